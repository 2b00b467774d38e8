"""Triton kernels of a stage on a GPU, one family per module. Importing one needs triton."""
