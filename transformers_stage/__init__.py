"""Stages computed by transformers' own layers, with Stageline's paged cache; for families without a row.

The only package of a worker that imports transformers. It is imported when a plan needs it.
"""
