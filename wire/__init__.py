"""Ids, errors, tensors, frames and channels of the cluster's RPCs. Imports gRPC and protobuf, never torch."""
