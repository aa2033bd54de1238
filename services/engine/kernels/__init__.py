"""Optional CPU kernels in C++ behind a C interface; the engine also runs without them."""
