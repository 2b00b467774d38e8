"""`python -m stageline` is the `stageline` command."""

import sys

from stageline.cli import main

if __name__ == "__main__":
    sys.exit(main())
