"""CPU kernels of our own, in C++ behind a plain C interface. Everything works without them."""
