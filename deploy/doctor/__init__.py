"""Checks hosts and the network between them before the processes of a cluster start there."""
