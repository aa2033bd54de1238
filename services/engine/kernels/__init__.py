"""Optional CPU kernels in C++ behind a C interface; the engine also runs without them.

`e4m3`, `dependent_launch` and `grid_waits` belong to kernels in Triton.
"""
