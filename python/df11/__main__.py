"""`python -m df11` is the command `df11`."""

import sys

from ._command import main

sys.exit(main())
