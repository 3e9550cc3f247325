"""`python -m memra_pp.cli`."""

import sys

from . import main

sys.exit(main())
