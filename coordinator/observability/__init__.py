"""Activity, metrics and traces that the coordinator records; read-only."""
