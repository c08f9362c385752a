"""``python -m fxremat``: the command line."""

import sys

from fxremat.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
