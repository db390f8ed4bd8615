"""Hello: what is checked before a session exists or goes on, and what is answered."""

from radixkv.core.errors import InvalidArgument
from radixkv.core.results import CacheConfig
from radixkv.pools.layout import KVSpec, LayoutError
from radixkv.server.pool_host import PoolHost
from radixkv.server.spec_wire import kv_spec_from_proto, kv_spec_to_proto
from radixkv.v1 import session_pb2 as pb
from radixkv.wire import limits

CAPABILITIES = ("local", "grpc", "partial_tail", "wait", "contents")


def check_hello(hello: pb.Hello) -> None:
    """Raise InvalidArgument, naming the field, for what no server could accept."""
    if hello.protocol_version != limits.PROTOCOL_VERSION:
        raise InvalidArgument(
            f"protocol_version is {hello.protocol_version}, this server speaks"
            f" {limits.PROTOCOL_VERSION}"
        )
    if len(hello.session_token) != limits.SESSION_TOKEN_BYTES:
        raise InvalidArgument(f"session_token must have {limits.SESSION_TOKEN_BYTES} bytes")
    _check_size("client", hello.client, limits.MAX_CLIENT_NAME_BYTES)
    _check_size("model_fingerprint", hello.model_fingerprint, limits.MAX_FINGERPRINT_BYTES)
    _check_count("capabilities", len(hello.capabilities), limits.MAX_CAPABILITIES)
    for capability in hello.capabilities:
        _check_size("capabilities", capability, limits.MAX_CAPABILITY_BYTES)
    _check_count("placeholder_tokens", len(hello.placeholder_tokens), limits.MAX_PLACEHOLDER_TOKENS)
    if any(token < 0 for token in hello.placeholder_tokens):
        raise InvalidArgument("placeholder_tokens has a negative token")
    if not hello.resume and not hello.model_fingerprint:
        raise InvalidArgument("model_fingerprint is empty: name the weights")
    if not hello.resume and not hello.HasField("kv_spec"):
        raise InvalidArgument("kv_spec is missing")


def _check_size(name: str, text: str, maximum: int) -> None:
    if len(text.encode()) > maximum:
        raise InvalidArgument(f"{name} is {len(text.encode())} bytes, at most {maximum} allowed")


def _check_count(name: str, count: int, maximum: int) -> None:
    if count > maximum:
        raise InvalidArgument(f"{name} has {count} entries, at most {maximum} are allowed")


def spec_of(hello: pb.Hello) -> KVSpec:
    """The KVSpec of a Hello. Raises InvalidArgument naming the field that is wrong."""
    try:
        return kv_spec_from_proto(hello.kv_spec)
    except LayoutError as error:
        raise InvalidArgument(str(error)) from None


def hello_reply(incarnation: bytes, pool_host: PoolHost, config: CacheConfig) -> pb.HelloReply:
    """The reply but for `status`, `session_id` and `last_step`; a refusal has it too."""
    reply = pb.HelloReply(
        protocol_version=limits.PROTOCOL_VERSION,
        capabilities=CAPABILITIES,
        incarnation=incarnation,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        block_bytes=pool_host.block_bytes,
        limits=limits_of(config),
    )
    if pool_host.spec is not None:
        reply.kv_spec.CopyFrom(kv_spec_to_proto(pool_host.spec))
    return reply


def limits_of(config: CacheConfig) -> pb.Limits:
    """What this server allows."""
    return pb.Limits(
        max_message_bytes=limits.MAX_MESSAGE_BYTES,
        max_tokens=config.max_tokens,
        max_ops_per_step=limits.MAX_OPS_PER_STEP,
        max_unacknowledged_steps=limits.MAX_UNACKNOWLEDGED_STEPS,
        max_waiting_acquires=config.max_waiting_acquires,
        max_leases=config.max_leases,
        max_reserve_blocks=config.max_reserve_blocks or max(config.num_blocks // 8, 1),
        max_private_blocks=config.max_private_blocks or config.num_blocks,
    )


def pools_message(pool_host: PoolHost) -> bytes:
    """The serialized Pools message; one descriptor per pool goes with it, in the same order."""
    arena = pool_host.arena
    assert arena is not None
    pool = pb.Pool(
        pool_id=0,
        device=arena.device,
        kind=arena.kind,
        size_bytes=arena.size_bytes,
        num_blocks=arena.num_blocks,
        block_bytes=arena.block_bytes,
    )
    return pb.ServerMessage(pools=pb.Pools(pools=[pool])).SerializeToString()
