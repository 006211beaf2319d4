"""The situations of real scripts on one GPU: ``make gpu``, or ``python -m benchmarks.gpu``.

Workers are processes that share the device (gloo, and connections of the library's own), or threads with the in-process
transport. Each case compares with an independent computation. Without a GPU the same cases run on the CPU.
"""
