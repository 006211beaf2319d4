"""Norm and spectral radius of a product of rounds, on values without a mean, without n x n entries."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .rounds import Array, Round, apply

__all__ = ["norm", "spectral_radius"]

# An error that is nothing but rounding.
_ROUNDING = 1e-12
# Lanczos: steps at most. How exact the distance of what is found to 0 and to 1 must be.
_STEPS, _RELATIVE = 6000, 1e-4
# Arnoldi: directions at a time.
_KRYLOV = 50
# Work that each search may do, in workers that mix, some seconds; what a round costs on top.
_WORK, _WORK_OF_A_ROUND = 1_600_000_000, 4000


def _work(rounds: Sequence[Round]) -> int:
    """Of applying the rounds once."""
    return sum(_WORK_OF_A_ROUND + len(round_.order) for round_ in rounds)


def _largest(diagonal: Sequence[float], beside: Sequence[float]) -> tuple[float, float]:
    """Of a symmetric tridiagonal matrix: the largest eigenvalue, by bisection, counting negative pivots (Sturm), and the size
    of the last entry of its unit eigenvector.

    That entry s follows from the last pivot p(z), which is 1 / ((T - z)^-1)[-1, -1]: at the eigenvalue p' = -1/s^2.
    """
    squares = [0.0, *(b * b for b in beside)]
    reach = [abs(b) for b in (0.0, *beside, 0.0)]
    low = max(diagonal)
    high = max(d + left + right for d, left, right in zip(diagonal, reach, reach[1:], strict=False))
    while high - low > 1e-15 * max(abs(low), abs(high)):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        pivot = -1.0
        for d, square in zip(diagonal, squares, strict=False):
            pivot = d - middle - square / pivot
            if pivot >= 0:
                if pivot > 0:
                    break  # some eigenvalue is larger
                pivot = -1e-300
        if pivot > 0:
            low = middle
        else:
            high = middle
    pivot, slope = -1.0, 0.0
    for d, square in zip(diagonal, squares, strict=False):
        slope = -1.0 + square * slope / (pivot * pivot)
        pivot = d - high - square / pivot or -1e-300
        if slope < -1e300:
            return high, 0.0
    return high, 1 / math.sqrt(-slope)


def norm(n: int, rounds: Sequence[Round]) -> float:
    """The 2-norm: Lanczos on the square, until the largest value found is near enough to an eigenvalue, or the work is done.

    Then it is too small, if anything. Orthogonality is lost on the way, which only repeats eigenvalues that were found.
    """
    v = np.random.default_rng(1).standard_normal((n, 1))
    v -= v.mean()
    v /= np.linalg.norm(v)
    last, beta = np.zeros_like(v), 0.0
    diagonal: list[float] = []
    beside: list[float] = []
    found, next_look = 0.0, 8
    steps = max(8, min(_STEPS, n - 1, _WORK // (2 * _work(rounds))))
    for step in range(1, steps + 1):
        w = apply(rounds, apply(rounds, v), transposed=True)
        w -= w.mean()  # rounding brings the mean back, whose eigenvalue is 1
        alpha = float((v * w).sum())
        diagonal.append(alpha)
        w -= alpha * v + beta * last
        beta = float(np.linalg.norm(w))
        ended = beta < 1e-14 or step == steps
        if step == next_look or ended:
            found, entry = _largest(diagonal, beside)
            if ended or beta * entry <= _RELATIVE * min(abs(found), max(1 - found, _ROUNDING)):
                break
            next_look = math.ceil(1.4 * step)
        beside.append(beta)
        last, v = v, w / beta
    return math.sqrt(max(found, 0.0))


def spectral_radius(n: int, rounds: Sequence[Round]) -> float:
    """Arnoldi on ever higher powers of the product.

    The power goes up, and the search goes on from the best direction, until what is found is near enough to an eigenvector, or
    the work is done.
    """
    start = np.random.default_rng(2).standard_normal(n)
    power, work = 1, _work(rounds)
    most = max(8, min(_KRYLOV, n - 1, _WORK // work))
    while True:
        basis, image = _krylov(start, list(rounds) * power, min(most, n - 1))
        size = image.shape[1]
        values, vectors = np.linalg.eig(image[:size])
        best = int(np.argmax(abs(values)))
        found, vector = min(float(abs(values[best])), 1.0), vectors[:, best]
        left = float(image[size, size - 1] * abs(vector[-1]))
        power *= 4
        near = left <= _RELATIVE * min(found, max(1 - found, _ROUNDING))
        if near or power * size * work > _WORK:
            return float(found ** (4 / power))
        start = np.real(vector) @ basis[:size]


def _krylov(start: Array, rounds: Sequence[Round], size: int) -> tuple[Array, Array]:
    """Orthonormal rows that the product of the rounds spans from ``start``, and what it makes of them in their terms."""
    basis, image = np.zeros((size + 1, len(start))), np.zeros((size + 1, size))
    start = start - start.mean()
    basis[0] = start / np.linalg.norm(start)
    for i in range(size):
        w = apply(rounds, basis[i][:, None])[:, 0]
        w = w - w.mean()  # rounding brings the mean back, whose eigenvalue is 1
        for _ in range(2):  # again for what rounding left the first time
            along = basis[: i + 1] @ w
            w = w - along @ basis[: i + 1]
            image[: i + 1, i] += along
        length = np.linalg.norm(w)
        if length < 1e-14:  # there are no further directions
            return basis[: i + 2], image[: i + 2, : i + 1]
        image[i + 1, i], basis[i + 1] = length, w / length
    return basis, image
