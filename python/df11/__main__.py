"""`python -m df11` is the command `df11`."""

import sys

from ._command import main

if __name__ == "__main__":
    sys.exit(main())
