"""Triton kernels without a GPU: `interpreted` runs them on CPU tensors, `compiled` compiles them for GPUs."""
