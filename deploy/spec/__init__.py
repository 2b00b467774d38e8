"""The cluster file: one YAML document that describes a cluster, whatever runs it."""
