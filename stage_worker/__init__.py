"""The stage worker: runs one stage of a model."""
