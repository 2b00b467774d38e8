"""The protocols of Stageline, and the Python generated from them (`make proto`)."""
