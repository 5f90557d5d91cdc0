"""Kernels on LLVM's vector types: recorded device functions as loops over rows or tables of pointers; reductions."""
