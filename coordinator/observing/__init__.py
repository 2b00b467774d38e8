"""What the coordinator knows about the run of its pipeline, for those who look at it."""
