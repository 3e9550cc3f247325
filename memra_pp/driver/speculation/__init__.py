"""Who proposes drafts, and how many."""
