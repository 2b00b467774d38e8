"""Protocols between the processes of one cluster."""
