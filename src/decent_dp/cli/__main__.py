"""``python -m decent_dp.cli``: the same as ``decent-dp``, for torchrun's ``-m``."""

from __future__ import annotations

import sys

from decent_dp.cli import main

if __name__ == "__main__":
    sys.exit(main())
