"""Fast forms of inner loops: for CUDA in Triton, which comes with torch's builds for CUDA, and for the CPU in Numba, an extra.

Each has a readable twin in torch, in the room that uses it, which runs where Triton or ``decent-dp[fast]`` is missing.
"""
