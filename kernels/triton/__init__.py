"""Triton kernels: for each operation a function with its reference's name and signature.

They never wait for the device: no result is read on the host, and grids depend on shapes alone,
so that every call can be captured in a CUDA graph. Block sizes come from ``kernels/tuning``.
"""

from overlap_spec.kernels.triton.carried import settle

settle()
