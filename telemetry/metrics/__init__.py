"""Metrics: definitions, recorded values, and their Prometheus and OTLP formats."""
