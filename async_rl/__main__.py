"""`python -m async_rl` is the command `async-rl`."""

import sys

from async_rl.cli import main

if __name__ == "__main__":
    sys.exit(main())
