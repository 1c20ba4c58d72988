"""``python -m metaphrase``: the command line, as ``metaphrase`` has it."""

import sys

from metaphrase.cli import main

if __name__ == "__main__":
    sys.exit(main())
