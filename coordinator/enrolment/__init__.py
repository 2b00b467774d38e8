"""Certificates for hosts with a join token, and their renewal."""
