"""KVSpec between its wire message and `radixkv.pools.layout.KVSpec`."""

from radixkv.pools.layout import KVSpec, LayoutError
from radixkv.v1 import session_pb2


def kv_spec_from_proto(message: session_pb2.KVSpec) -> KVSpec:
    """Raises `LayoutError` naming the field that is out of range or contradicts the others."""
    spec = KVSpec(
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        value_head_dim=message.value_head_dim,
        dtype=message.dtype,
        block_size=message.block_size,
        layout=message.layout,
        scale_bytes=message.scale_bytes,
        backend=message.backend,
    )
    if message.block_bytes != spec.block_bytes:
        raise LayoutError(
            f"kv_spec.block_bytes is {message.block_bytes}, the other fields make it "
            f"{spec.block_bytes}"
        )
    return spec


def kv_spec_to_proto(spec: KVSpec) -> session_pb2.KVSpec:
    """The wire message with all fields, `block_bytes` included."""
    return session_pb2.KVSpec(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        value_head_dim=spec.value_head_dim,
        dtype=spec.dtype,
        block_size=spec.block_size,
        layout=spec.layout,
        scale_bytes=spec.scale_bytes,
        backend=spec.backend,
        block_bytes=spec.block_bytes,
    )
