"""Reference inference worker over a shared pool."""
