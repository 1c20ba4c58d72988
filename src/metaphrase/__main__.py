"""Run the command line with ``python -m metaphrase``."""

import sys

from metaphrase.cli import main

if __name__ == "__main__":
    sys.exit(main())
