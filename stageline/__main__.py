"""`python -m stageline` is the `stageline` command."""

import sys

from stageline.entry import main

if __name__ == "__main__":
    sys.exit(main())
