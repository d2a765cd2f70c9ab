"""``python -m distdl``: see :mod:`distdl.programs.cli`."""

import sys

from .programs.cli import main

if __name__ == "__main__":
    sys.exit(main())
