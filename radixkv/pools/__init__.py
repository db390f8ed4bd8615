"""Where the bytes of the blocks are."""
