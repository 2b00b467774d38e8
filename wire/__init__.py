"""How things travel: ids, roles, errors, tensors, frames, channels. Knows gRPC and protobuf, never torch."""
