"""The gRPC contract of Stageline, and the Python that is generated from it."""
