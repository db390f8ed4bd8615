"""The server process around the core."""
