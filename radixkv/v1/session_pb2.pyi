from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReleaseReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISHED: _ClassVar[ReleaseReason]
    ABORTED: _ClassVar[ReleaseReason]
    PREEMPTED: _ClassVar[ReleaseReason]
    CONVERSATION_OVER: _ClassVar[ReleaseReason]

class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OK: _ClassVar[Code]
    INVALID_ARGUMENT: _ClassVar[Code]
    NOT_FOUND: _ClassVar[Code]
    ALREADY_EXISTS: _ClassVar[Code]
    EXHAUSTED: _ClassVar[Code]
    TOO_LARGE: _ClassVar[Code]
    FAILED_PRECONDITION: _ClassVar[Code]
    PERMISSION_DENIED: _ClassVar[Code]
    UNAVAILABLE: _ClassVar[Code]
    CANCELLED: _ClassVar[Code]
    UNIMPLEMENTED: _ClassVar[Code]
    INTERNAL: _ClassVar[Code]
FINISHED: ReleaseReason
ABORTED: ReleaseReason
PREEMPTED: ReleaseReason
CONVERSATION_OVER: ReleaseReason
OK: Code
INVALID_ARGUMENT: Code
NOT_FOUND: Code
ALREADY_EXISTS: Code
EXHAUSTED: Code
TOO_LARGE: Code
FAILED_PRECONDITION: Code
PERMISSION_DENIED: Code
UNAVAILABLE: Code
CANCELLED: Code
UNIMPLEMENTED: Code
INTERNAL: Code

class KVSpec(_message.Message):
    __slots__ = ("num_layers", "num_kv_heads", "head_dim", "value_head_dim", "dtype", "block_size", "layout", "scale_bytes", "backend", "block_bytes")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    VALUE_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SCALE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: str
    block_size: int
    layout: str
    scale_bytes: int
    backend: str
    block_bytes: int
    def __init__(self, num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., value_head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., layout: _Optional[str] = ..., scale_bytes: _Optional[int] = ..., backend: _Optional[str] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class Scope(_message.Message):
    __slots__ = ("adapter", "adapter_version", "salt")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    adapter_version: str
    salt: str
    def __init__(self, adapter: _Optional[str] = ..., adapter_version: _Optional[str] = ..., salt: _Optional[str] = ...) -> None: ...

class ContentRange(_message.Message):
    __slots__ = ("start", "length", "content_id")
    START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    CONTENT_ID_FIELD_NUMBER: _ClassVar[int]
    start: int
    length: int
    content_id: bytes
    def __init__(self, start: _Optional[int] = ..., length: _Optional[int] = ..., content_id: _Optional[bytes] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("session_token", "incarnation", "server_version", "grpc_address")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    incarnation: bytes
    server_version: str
    grpc_address: str
    def __init__(self, session_token: _Optional[bytes] = ..., incarnation: _Optional[bytes] = ..., server_version: _Optional[str] = ..., grpc_address: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("session_token", "protocol_version", "capabilities", "client", "model_fingerprint", "kv_spec", "placeholder_tokens", "resume", "replies_seen")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_SPEC_FIELD_NUMBER: _ClassVar[int]
    PLACEHOLDER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    REPLIES_SEEN_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    protocol_version: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    client: str
    model_fingerprint: str
    kv_spec: KVSpec
    placeholder_tokens: _containers.RepeatedScalarFieldContainer[int]
    resume: bool
    replies_seen: int
    def __init__(self, session_token: _Optional[bytes] = ..., protocol_version: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ..., client: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., kv_spec: _Optional[_Union[KVSpec, _Mapping]] = ..., placeholder_tokens: _Optional[_Iterable[int]] = ..., resume: _Optional[bool] = ..., replies_seen: _Optional[int] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("status", "protocol_version", "capabilities", "incarnation", "session_id", "last_step", "block_size", "num_blocks", "block_bytes", "limits", "kv_spec")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    KV_SPEC_FIELD_NUMBER: _ClassVar[int]
    status: Status
    protocol_version: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    incarnation: bytes
    session_id: int
    last_step: int
    block_size: int
    num_blocks: int
    block_bytes: int
    limits: Limits
    kv_spec: KVSpec
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., protocol_version: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ..., incarnation: _Optional[bytes] = ..., session_id: _Optional[int] = ..., last_step: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., kv_spec: _Optional[_Union[KVSpec, _Mapping]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_message_bytes", "max_tokens", "max_ops_per_step", "max_unacknowledged_steps", "max_waiting_acquires", "max_leases", "max_reserve_blocks", "max_private_blocks")
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_OPS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_UNACKNOWLEDGED_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_ACQUIRES_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASES_FIELD_NUMBER: _ClassVar[int]
    MAX_RESERVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_PRIVATE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    max_message_bytes: int
    max_tokens: int
    max_ops_per_step: int
    max_unacknowledged_steps: int
    max_waiting_acquires: int
    max_leases: int
    max_reserve_blocks: int
    max_private_blocks: int
    def __init__(self, max_message_bytes: _Optional[int] = ..., max_tokens: _Optional[int] = ..., max_ops_per_step: _Optional[int] = ..., max_unacknowledged_steps: _Optional[int] = ..., max_waiting_acquires: _Optional[int] = ..., max_leases: _Optional[int] = ..., max_reserve_blocks: _Optional[int] = ..., max_private_blocks: _Optional[int] = ...) -> None: ...

class Pools(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    def __init__(self, pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("pool_id", "device", "kind", "size_bytes", "num_blocks", "block_bytes")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    pool_id: int
    device: str
    kind: str
    size_bytes: int
    num_blocks: int
    block_bytes: int
    def __init__(self, pool_id: _Optional[int] = ..., device: _Optional[str] = ..., kind: _Optional[str] = ..., size_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class ClientMessage(_message.Message):
    __slots__ = ("hello", "step", "bye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    step: Step
    bye: Bye
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("attached", "hello", "pools", "replies", "pressure", "ended")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    attached: Attached
    hello: HelloReply
    pools: Pools
    replies: Replies
    pressure: Pressure
    ended: Ended
    def __init__(self, attached: _Optional[_Union[Attached, _Mapping]] = ..., hello: _Optional[_Union[HelloReply, _Mapping]] = ..., pools: _Optional[_Union[Pools, _Mapping]] = ..., replies: _Optional[_Union[Replies, _Mapping]] = ..., pressure: _Optional[_Union[Pressure, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ...) -> None: ...

class Bye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Step(_message.Message):
    __slots__ = ("number", "replies_seen", "ops")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REPLIES_SEEN_FIELD_NUMBER: _ClassVar[int]
    OPS_FIELD_NUMBER: _ClassVar[int]
    number: int
    replies_seen: int
    ops: _containers.RepeatedCompositeFieldContainer[Op]
    def __init__(self, number: _Optional[int] = ..., replies_seen: _Optional[int] = ..., ops: _Optional[_Iterable[_Union[Op, _Mapping]]] = ...) -> None: ...

class Op(_message.Message):
    __slots__ = ("op_id", "acquire", "extend", "trim", "fork", "commit", "release", "refill", "give_back")
    OP_ID_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    TRIM_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    REFILL_FIELD_NUMBER: _ClassVar[int]
    GIVE_BACK_FIELD_NUMBER: _ClassVar[int]
    op_id: int
    acquire: Acquire
    extend: Extend
    trim: Trim
    fork: Fork
    commit: Commit
    release: Release
    refill: Refill
    give_back: GiveBack
    def __init__(self, op_id: _Optional[int] = ..., acquire: _Optional[_Union[Acquire, _Mapping]] = ..., extend: _Optional[_Union[Extend, _Mapping]] = ..., trim: _Optional[_Union[Trim, _Mapping]] = ..., fork: _Optional[_Union[Fork, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., refill: _Optional[_Union[Refill, _Mapping]] = ..., give_back: _Optional[_Union[GiveBack, _Mapping]] = ...) -> None: ...

class Acquire(_message.Message):
    __slots__ = ("lease_id", "tokens", "scope", "contents", "extra_blocks", "partial_tail", "capacity_wait_ms", "wait_ms", "resumed", "tags", "retention")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_TAIL_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    tokens: bytes
    scope: Scope
    contents: _containers.RepeatedCompositeFieldContainer[ContentRange]
    extra_blocks: int
    partial_tail: bool
    capacity_wait_ms: int
    wait_ms: int
    resumed: bool
    tags: _containers.RepeatedScalarFieldContainer[str]
    retention: Retention
    def __init__(self, lease_id: _Optional[int] = ..., tokens: _Optional[bytes] = ..., scope: _Optional[_Union[Scope, _Mapping]] = ..., contents: _Optional[_Iterable[_Union[ContentRange, _Mapping]]] = ..., extra_blocks: _Optional[int] = ..., partial_tail: _Optional[bool] = ..., capacity_wait_ms: _Optional[int] = ..., wait_ms: _Optional[int] = ..., resumed: _Optional[bool] = ..., tags: _Optional[_Iterable[str]] = ..., retention: _Optional[_Union[Retention, _Mapping]] = ...) -> None: ...

class Retention(_message.Message):
    __slots__ = ("priority", "ttl_ms")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    priority: int
    ttl_ms: int
    def __init__(self, priority: _Optional[int] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class Extend(_message.Message):
    __slots__ = ("lease_id", "num_blocks")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    num_blocks: int
    def __init__(self, lease_id: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class Trim(_message.Message):
    __slots__ = ("lease_id", "upto")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    UPTO_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    upto: int
    def __init__(self, lease_id: _Optional[int] = ..., upto: _Optional[int] = ...) -> None: ...

class Fork(_message.Message):
    __slots__ = ("lease_id", "child_ids", "upto", "tail_block")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CHILD_IDS_FIELD_NUMBER: _ClassVar[int]
    UPTO_FIELD_NUMBER: _ClassVar[int]
    TAIL_BLOCK_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    child_ids: _containers.RepeatedScalarFieldContainer[int]
    upto: int
    tail_block: int
    def __init__(self, lease_id: _Optional[int] = ..., child_ids: _Optional[_Iterable[int]] = ..., upto: _Optional[int] = ..., tail_block: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("lease_id", "upto", "tokens", "blocks", "contents")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    UPTO_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    upto: int
    tokens: bytes
    blocks: bytes
    contents: _containers.RepeatedCompositeFieldContainer[ContentRange]
    def __init__(self, lease_id: _Optional[int] = ..., upto: _Optional[int] = ..., tokens: _Optional[bytes] = ..., blocks: _Optional[bytes] = ..., contents: _Optional[_Iterable[_Union[ContentRange, _Mapping]]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("lease_id", "reason", "commit")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    reason: ReleaseReason
    commit: Commit
    def __init__(self, lease_id: _Optional[int] = ..., reason: _Optional[_Union[ReleaseReason, str]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ...) -> None: ...

class Refill(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class GiveBack(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: bytes
    def __init__(self, blocks: _Optional[bytes] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: Code
    message: str
    def __init__(self, code: _Optional[_Union[Code, str]] = ..., message: _Optional[str] = ...) -> None: ...

class Replies(_message.Message):
    __slots__ = ("replies", "last_step")
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[Reply]
    last_step: int
    def __init__(self, replies: _Optional[_Iterable[_Union[Reply, _Mapping]]] = ..., last_step: _Optional[int] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("number", "op_id", "status", "acquire", "extend", "trim", "fork", "commit", "release", "refill", "give_back")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OP_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    TRIM_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    REFILL_FIELD_NUMBER: _ClassVar[int]
    GIVE_BACK_FIELD_NUMBER: _ClassVar[int]
    number: int
    op_id: int
    status: Status
    acquire: AcquireReply
    extend: ExtendReply
    trim: TrimReply
    fork: ForkReply
    commit: CommitReply
    release: ReleaseReply
    refill: RefillReply
    give_back: GiveBackReply
    def __init__(self, number: _Optional[int] = ..., op_id: _Optional[int] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., acquire: _Optional[_Union[AcquireReply, _Mapping]] = ..., extend: _Optional[_Union[ExtendReply, _Mapping]] = ..., trim: _Optional[_Union[TrimReply, _Mapping]] = ..., fork: _Optional[_Union[ForkReply, _Mapping]] = ..., commit: _Optional[_Union[CommitReply, _Mapping]] = ..., release: _Optional[_Union[ReleaseReply, _Mapping]] = ..., refill: _Optional[_Union[RefillReply, _Mapping]] = ..., give_back: _Optional[_Union[GiveBackReply, _Mapping]] = ...) -> None: ...

class AcquireReply(_message.Message):
    __slots__ = ("lease_id", "block_table", "cached_tokens", "being_computed", "miss", "waited_ms", "onboarding")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEING_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    ONBOARDING_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    block_table: bytes
    cached_tokens: int
    being_computed: int
    miss: MissReason
    waited_ms: int
    onboarding: Onboarding
    def __init__(self, lease_id: _Optional[int] = ..., block_table: _Optional[bytes] = ..., cached_tokens: _Optional[int] = ..., being_computed: _Optional[int] = ..., miss: _Optional[_Union[MissReason, _Mapping]] = ..., waited_ms: _Optional[int] = ..., onboarding: _Optional[_Union[Onboarding, _Mapping]] = ...) -> None: ...

class Onboarding(_message.Message):
    __slots__ = ("reason", "cpu_tokens", "nvme_tokens", "remote_tokens", "left_tokens")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LOADED: _ClassVar[Onboarding.Reason]
        BEST_EFFORT: _ClassVar[Onboarding.Reason]
        BREAK_EVEN: _ClassVar[Onboarding.Reason]
        TIMEOUT: _ClassVar[Onboarding.Reason]
        FAILED: _ClassVar[Onboarding.Reason]
        NO_ROOM: _ClassVar[Onboarding.Reason]
    LOADED: Onboarding.Reason
    BEST_EFFORT: Onboarding.Reason
    BREAK_EVEN: Onboarding.Reason
    TIMEOUT: Onboarding.Reason
    FAILED: Onboarding.Reason
    NO_ROOM: Onboarding.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    CPU_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NVME_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    reason: Onboarding.Reason
    cpu_tokens: int
    nvme_tokens: int
    remote_tokens: int
    left_tokens: int
    def __init__(self, reason: _Optional[_Union[Onboarding.Reason, str]] = ..., cpu_tokens: _Optional[int] = ..., nvme_tokens: _Optional[int] = ..., remote_tokens: _Optional[int] = ..., left_tokens: _Optional[int] = ...) -> None: ...

class MissReason(_message.Message):
    __slots__ = ("kind", "at_token", "nearest_tokens")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[MissReason.Kind]
        EMPTY_NAMESPACE: _ClassVar[MissReason.Kind]
        DIVERGES: _ClassVar[MissReason.Kind]
        ENDS: _ClassVar[MissReason.Kind]
        EVICTED: _ClassVar[MissReason.Kind]
        SHORT: _ClassVar[MissReason.Kind]
        UNCACHEABLE: _ClassVar[MissReason.Kind]
    NONE: MissReason.Kind
    EMPTY_NAMESPACE: MissReason.Kind
    DIVERGES: MissReason.Kind
    ENDS: MissReason.Kind
    EVICTED: MissReason.Kind
    SHORT: MissReason.Kind
    UNCACHEABLE: MissReason.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    AT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NEAREST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    kind: MissReason.Kind
    at_token: int
    nearest_tokens: bytes
    def __init__(self, kind: _Optional[_Union[MissReason.Kind, str]] = ..., at_token: _Optional[int] = ..., nearest_tokens: _Optional[bytes] = ...) -> None: ...

class ExtendReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: bytes
    def __init__(self, blocks: _Optional[bytes] = ...) -> None: ...

class TrimReply(_message.Message):
    __slots__ = ("to_reserve",)
    TO_RESERVE_FIELD_NUMBER: _ClassVar[int]
    to_reserve: bytes
    def __init__(self, to_reserve: _Optional[bytes] = ...) -> None: ...

class ForkReply(_message.Message):
    __slots__ = ("tail_blocks",)
    TAIL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tail_blocks: bytes
    def __init__(self, tail_blocks: _Optional[bytes] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("published_tokens", "duplicate_blocks")
    PUBLISHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    published_tokens: int
    duplicate_blocks: int
    def __init__(self, published_tokens: _Optional[int] = ..., duplicate_blocks: _Optional[int] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("cached_tokens",)
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ...) -> None: ...

class RefillReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: bytes
    def __init__(self, blocks: _Optional[bytes] = ...) -> None: ...

class GiveBackReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pressure(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: Status
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ...) -> None: ...
