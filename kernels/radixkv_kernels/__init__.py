"""Attention over paged KV blocks."""
