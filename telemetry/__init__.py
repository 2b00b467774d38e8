"""What a running cluster tells about itself: spans, metrics, logs."""
