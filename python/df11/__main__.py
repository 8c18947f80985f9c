"""The command `df11`, the same as `cargo install` installs; `python -m df11` runs it too."""

from __future__ import annotations

import os
import signal
import sys

from ._native import run_command


def main() -> int:
    """Run the command with the arguments of this process; `df11 --help` lists them."""
    # The command has its own handler; Python's would raise KeyboardInterrupt after it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # `df11 doctor` tells about this interpreter.
    os.environ["DF11_PYTHON"] = sys.executable
    return run_command(["df11", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
