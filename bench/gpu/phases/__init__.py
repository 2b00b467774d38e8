"""Phases of `python -m bench gpu`, one module each, with a function `measure`."""
