"""`memra-pp bench`: what is measured, how, and the tables and the page that show it."""
