"""radixkv: a node-local service that owns the KV cache of LLM inference."""

__version__ = "0.1.0"
