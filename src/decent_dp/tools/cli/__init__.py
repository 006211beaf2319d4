"""The command line ``decent-dp``. Needs typer and rich: ``pip install -e '.[cli]'``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from decent_dp._checks import install_hint

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments after the program's name; None for those of this process.

    Returns:
        The exit code: 0 fine, 1 something failed while it ran, 2 bad input, 130 stopped with Ctrl-C.
    """
    try:
        from decent_dp.tools.cli.app import run
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich", "click"):
            raise
        sys.stderr.write(f"decent-dp: the command line needs typer and rich; {install_hint('cli')}\n")
        return 1
    return run(sys.argv[1:] if argv is None else list(argv))
