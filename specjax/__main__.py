"""``python -m specjax``: the command line."""

import sys

from specjax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
