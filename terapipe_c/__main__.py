"""`python -m terapipe_c` is the command `terapipe`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
