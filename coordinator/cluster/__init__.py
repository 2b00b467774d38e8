"""Cluster membership, phases, plans in force, and the streams to workers."""
