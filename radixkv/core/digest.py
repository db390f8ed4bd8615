"""Digests of prefixes: the names under which other tiers know a block.

A digest only finds candidates; what is found carries its whole identity and is compared with it.
The chain starts from the namespace, so equal tokens in two namespaces never share a name, and is
the same in every process and after every restart.
"""

from hashlib import blake2b

from radixkv.core.tier_ops import DIGEST_BYTES


def root_digest(namespace: bytes) -> bytes:
    """The digest of the empty prefix of a namespace."""
    return blake2b(namespace, digest_size=DIGEST_BYTES, person=b"radixkv-root").digest()


def block_digest(parent: bytes, tokens: bytes) -> bytes:
    """The digest of the prefix that ends with a block of these (canonical) tokens. 0.6 µs."""
    return blake2b(parent + tokens, digest_size=DIGEST_BYTES, person=b"radixkv-block").digest()
