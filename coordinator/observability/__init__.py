"""What the coordinator records: activity, metrics, traces. It changes nothing."""
