"""Identities of processes, and the X.509 certificates that prove them."""

CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.crt", "tls.crt", "tls.key"
"""Of a directory with the certificate of a process."""
