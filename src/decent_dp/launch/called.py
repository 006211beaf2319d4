"""What a worker of ``spawn`` does: calls a function, and leaves its result in a file."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any, BinaryIO

import torch.distributed as dist

from decent_dp._checks import install_hint
from decent_dp.launch.group import initialize_dist

__all__ = ["dumped", "main"]


def dumped(values: Any, by_value: bool) -> bytes:
    """Pickles, with the code of what is defined in the main module if ``by_value``."""
    dumps: Callable[[Any], bytes] = pickle.dumps
    if by_value:
        try:
            import cloudpickle

            dumps = cloudpickle.dumps
        except ImportError:
            fn = values[0]
            if getattr(fn, "__module__", None) == "__main__":
                raise ImportError(
                    f"workers cannot import {getattr(fn, '__name__', fn)!r}, which is defined in a notebook: put it in a file "
                    f"and import it, or install cloudpickle; {install_hint('notebook')}",
                    name="cloudpickle",
                ) from None
    try:
        return dumps(values)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"spawn() pickles the function, its arguments and its results, and one of them cannot be: {error}. Define the "
            "function at the top level of a file, and make in it what cannot be pickled"
        ) from error


def main(folder: str, call: BinaryIO, by_value: bool) -> None:
    """Calls what is in the file ``call``, and writes the pickled result to the folder's file with this rank for a name."""
    initialize_dist()
    fn, args = pickle.load(call)
    result = dumped(fn(*args), by_value)
    path = os.path.join(folder, os.environ["RANK"])
    with open(f"{path}.part", "wb") as file:
        file.write(result)
    os.rename(f"{path}.part", path)
    if dist.is_initialized():
        dist.destroy_process_group()
