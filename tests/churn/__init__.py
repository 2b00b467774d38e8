"""Long-running request churn and leak detection in the coordinator."""
