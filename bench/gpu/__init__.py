"""Measures a GPU in minutes: `python -m bench gpu`."""
