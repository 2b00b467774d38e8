"""Remote checkpoints: their sources, the transfer of byte ranges, and a sparse cache of tensors on disk."""
