"""Collects what a report of a problem needs, without secrets."""
