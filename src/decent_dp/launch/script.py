"""Runs a worker's script as Python would, and leaves the launcher a note of the exception that ends it.

The launcher starts this file as ``python script.py ATTEMPT MOST SCRIPT ARGS...``, or with ``-m MODULE`` for SCRIPT, or with
``--call FOLDER`` (``spawn``). It does not import torch: what the script sets in the environment before it imports torch counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
import types
from collections.abc import Sequence
from multiprocessing import spawn as preparing
from typing import Any

__all__ = ["last_line", "main", "note"]

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Runs ``SCRIPT ARGS...`` or ``-m MODULE ARGS...`` as the main module, after the number of restarts so far and at most."""
    if sys.platform == "linux":
        # A SIGTERM from the kernel when the parent has gone, however it went.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # torchrun's names.
    os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"], *argv = argv
    if argv[0] == "--call":
        try:
            with open(os.path.join(argv[1], "call"), "rb") as file:
                by_value, parents = pickle.load(file)
                preparing.prepare(parents)  # the caller's path, by which alone this package may be found; its main module
                from decent_dp.launch import called

                called.main(argv[1], file, by_value)
        except BaseException as error:
            # While the frames still live: what ends with them, the others will notice later.
            note(error, own=(__file__, os.path.join(os.path.dirname(__file__), "called.py")))
            sys.exit(1)
        return
    module = argv[0] == "-m"
    sys.argv = argv[1:] if module else argv
    name = sys.argv[0]
    if not getattr(sys.flags, "safe_path", False):
        # So far it is this file's folder.
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.abspath(name))
    try:
        if module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            _run_file(name)
    except Exception as error:
        trace = note(error, own=(__file__, runpy.__file__, "<frozen runpy>"))
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _run_file(name: str) -> None:
    with open(name, "rb") as file:
        code = compile(file.read(), name, "exec", dont_inherit=True)
    # A module of its own, for pickle and for processes that the script starts: they look its names and its file up.
    script = types.ModuleType("__main__")
    script.__dict__.update(__file__=os.path.abspath(name), __builtins__=__builtins__)
    _KEPT.append(sys.modules["__main__"])
    sys.modules["__main__"] = script
    exec(code, script.__dict__)


# The module of this file, which nothing else refers to from then on.
_KEPT: list[types.ModuleType] = []


def note(error: BaseException, own: Sequence[str]) -> types.TracebackType | None:
    """Writes the exception where a launcher looks for it, in torchrun's form, and tells what runs at exit that one ends the
    script, as Python does.

    Returns:
        Its traceback, without the frames of the files ``own`` that come before all others.
    """
    sys.last_value = error
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        now = time.time()
        lines = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        extra: dict[str, Any] = {"py_callstack": lines, "timestamp": str(int(now)), "time": now}
        document = {"message": {"message": last_line(error), "extraInfo": extra}}
        # A full disk must not hide the exception.
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump(document, file)
    return trace


def last_line(error: BaseException) -> str:
    """Returns the exception's kind and text, as at the end of its traceback, in one line of bounded length."""
    text = " ".join("".join(traceback.format_exception_only(type(error), error)).split())
    return text if len(text) <= 500 else text[:499] + "…"


if __name__ == "__main__":
    main(sys.argv[1:])
