"""What the coordinator remembers of the last minutes, for whoever looks."""
