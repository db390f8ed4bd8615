"""Client of radixkv."""
