"""CPU kernels in C, with torch as the fallback."""
