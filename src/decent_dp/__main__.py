"""``python -m decent_dp``: the command line, as ``decent-dp``; also for torchrun's ``-m``."""

from __future__ import annotations

import sys

from decent_dp.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
