"""Durable state of a coordinator: accepted requests, their progress, and epochs."""
