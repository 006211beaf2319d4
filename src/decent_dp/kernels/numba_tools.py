"""How the kernels for the CPU are compiled, and how they read tensors whose addresses they get.

Numba's cache compares the file of a kernel, not this one, with what was compiled. So the files that use this one name its
digest (a test compares them): after a change here they change, too, and are compiled again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit, types
from numba.extending import intrinsic

__all__ = ["compiled", "floats_at"]


def compiled(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compiles a function for ``signature`` now. Its calls release the interpreter lock, and check no bounds.

    Without ``fastmath``, and without fused products and sums: numbers are those of the same operations in torch.
    """

    def compile_it(function: Callable[..., Any]) -> Any:
        try:
            return njit(signature, nogil=True, cache=True)(function)
        except Exception:
            # No folder can be written, a disk is full, or a file is broken: without the cache, each process compiles. If it
            # was another error, it comes again. (Numba replaces its files whole, so that many processes may write them.)
            return njit(signature, nogil=True)(function)

    return compile_it


@intrinsic
def floats_at(typing_context: Any, address: Any) -> Any:
    """The float32 values that lie at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(address), generate
