"""What server and clients share: limits, framing, gRPC options, paths."""
