"""Mutated inputs for everything that reads bytes from outside."""
