"""Namespaces: everything that keeps callers apart, as one canonical key.

The key is a concatenation of tagged, length-prefixed fields, so two different sets of fields never
give the same bytes, and it is the same in every process and after every restart.
"""

import struct

from xxhash import xxh3_64_intdigest

from radixkv.core.errors import InvalidArgument

_TAGS = {"model": 1, "kv_spec": 2, "adapter": 3, "adapter_version": 4, "salt": 5}
MAX_FIELD_BYTES = 4096


def namespace_key(
    *, model: str, kv_spec: bytes, adapter: str = "", adapter_version: str = "", salt: str = ""
) -> bytes:
    """The key of a namespace.

    Raises InvalidArgument for a field that is too long or not encodable, and for an adapter
    without a version (a reload in place would otherwise find the old weights' KV).
    """
    if adapter and not adapter_version:
        raise InvalidArgument(
            "adapter without adapter_version: KV of two loads of an adapter must not be mixed"
        )
    if adapter_version and not adapter:
        raise InvalidArgument("adapter_version without adapter")
    fields = {
        "model": _encode("model", model),
        "kv_spec": kv_spec,
        "adapter": _encode("adapter", adapter),
        "adapter_version": _encode("adapter_version", adapter_version),
        "salt": _encode("salt", salt),
    }
    parts = []
    for name, value in fields.items():
        if len(value) > MAX_FIELD_BYTES:
            raise InvalidArgument(
                f"{name} is {len(value)} bytes long, at most {MAX_FIELD_BYTES} are allowed"
            )
        parts.append(struct.pack("<BI", _TAGS[name], len(value)))
        parts.append(value)
    return b"".join(parts)


def _encode(name: str, value: str) -> bytes:
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name} is not valid Unicode text") from None


def namespace_seed(key: bytes) -> int:
    """64-bit seed for digests within this namespace; stable across processes."""
    return xxh3_64_intdigest(key)
