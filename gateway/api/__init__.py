"""The HTTP API: one module per dialect."""
