"""Generated protobuf code; `make proto` writes it."""
