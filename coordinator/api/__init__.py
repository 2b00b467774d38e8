"""The gRPC edge: decodes, makes one domain call, encodes."""
