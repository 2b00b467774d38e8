"""The spans of requests, as the coordinator sees them."""
