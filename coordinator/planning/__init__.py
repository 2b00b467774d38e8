"""Which worker holds which layers: data, search, memory formulas, refusals."""
