"""`python -m tinyloop_py` is the `tinyloop` command."""

import sys

from .cli import main

sys.exit(main())
