"""Digests of prefixes: the names under which other tiers know a block.

A digest only finds candidates; what is found carries its whole identity and is compared with it.
The chain starts from the namespace, so equal tokens in two namespaces never share a name, and is
the same in every process and after every restart. The first TAG_BYTES of all digests of a namespace
are the same, so that all its objects can be named at once.
"""

from hashlib import blake2b

from radixkv.core.tier_ops import DIGEST_BYTES

TAG_BYTES = 6
_REST = DIGEST_BYTES - TAG_BYTES
EVERYTHING = bytes(DIGEST_BYTES)  # names every object, see `all_of`


def root_digest(namespace: bytes) -> bytes:
    """The digest of the empty prefix of a namespace."""
    return blake2b(namespace, digest_size=DIGEST_BYTES, person=b"radixkv-root").digest()


def block_digest(parent: bytes, tokens: bytes) -> bytes:
    """The digest of the prefix that ends with a block of these (canonical) tokens. 0.7 µs."""
    rest = blake2b(parent + tokens, digest_size=_REST, person=b"radixkv-block").digest()
    return parent[:TAG_BYTES] + rest


def all_of(digest: bytes) -> bytes:
    """What names all objects of a digest's namespace: its tag and zeros."""
    return digest[:TAG_BYTES] + bytes(_REST)


def names_many(digest: bytes) -> bool:
    """Whether this names all objects of a namespace, or everything."""
    return digest[TAG_BYTES:] == bytes(_REST)
