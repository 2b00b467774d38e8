"""Which worker holds which layers."""
