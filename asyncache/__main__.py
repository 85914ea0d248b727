"""``python -m asyncache``: see :mod:`asyncache.cli`."""

from __future__ import annotations

import sys

from asyncache.cli import main

if __name__ == "__main__":
    sys.exit(main())
