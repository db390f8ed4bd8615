"""Two servers that share a remote: what one has computed is attached under the other."""
