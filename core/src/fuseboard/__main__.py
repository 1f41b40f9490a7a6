"""`python -m fuseboard`: the same as the command `fuseboard`."""

from __future__ import annotations

import sys

from fuseboard.ops.cli import main

if __name__ == "__main__":
    sys.exit(main())
