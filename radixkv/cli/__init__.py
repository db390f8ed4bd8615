"""Command lines: radixkv-server and radixkv."""
