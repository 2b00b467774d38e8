"""Requests that come and go for a long time, and what the coordinator keeps of them."""
