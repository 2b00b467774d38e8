"""gRPC services: decode, make one domain call, encode."""
