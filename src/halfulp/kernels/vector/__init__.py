"""Kernels on LLVM's vector types: traces as loops, and reductions of rows."""
