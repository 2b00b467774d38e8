"""Requests from acceptance to their last message."""
