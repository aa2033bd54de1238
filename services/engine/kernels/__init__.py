"""Optional CPU kernels in C++ behind a C interface; the engine also runs without them.

`e4m3` belongs to kernels in Triton.
"""
