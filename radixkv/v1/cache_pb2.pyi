from radixkv.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NamespaceRef(_message.Message):
    __slots__ = ("model_fingerprint", "scope")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    scope: _session_pb2.Scope
    def __init__(self, model_fingerprint: _Optional[str] = ..., scope: _Optional[_Union[_session_pb2.Scope, _Mapping]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("namespace", "tokens", "contents")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    namespace: NamespaceRef
    tokens: bytes
    contents: _containers.RepeatedCompositeFieldContainer[_session_pb2.ContentRange]
    def __init__(self, namespace: _Optional[_Union[NamespaceRef, _Mapping]] = ..., tokens: _Optional[bytes] = ..., contents: _Optional[_Iterable[_Union[_session_pb2.ContentRange, _Mapping]]] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("cached_tokens", "being_computed", "miss")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEING_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    being_computed: int
    miss: _session_pb2.MissReason
    def __init__(self, cached_tokens: _Optional[int] = ..., being_computed: _Optional[int] = ..., miss: _Optional[_Union[_session_pb2.MissReason, _Mapping]] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("incarnation", "server_version", "uptime_ms", "books", "counters", "num_sessions", "num_leases", "num_waiting", "num_namespaces", "num_nodes", "block_bytes", "block_size", "draining", "tiers")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    BOOKS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    incarnation: bytes
    server_version: str
    uptime_ms: int
    books: Books
    counters: Counters
    num_sessions: int
    num_leases: int
    num_waiting: int
    num_namespaces: int
    num_nodes: int
    block_bytes: int
    block_size: int
    draining: bool
    tiers: _containers.RepeatedCompositeFieldContainer[Tier]
    def __init__(self, incarnation: _Optional[bytes] = ..., server_version: _Optional[str] = ..., uptime_ms: _Optional[int] = ..., books: _Optional[_Union[Books, _Mapping]] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., num_sessions: _Optional[int] = ..., num_leases: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_namespaces: _Optional[int] = ..., num_nodes: _Optional[int] = ..., block_bytes: _Optional[int] = ..., block_size: _Optional[int] = ..., draining: _Optional[bool] = ..., tiers: _Optional[_Iterable[_Union[Tier, _Mapping]]] = ...) -> None: ...

class Tier(_message.Message):
    __slots__ = ("name", "state", "problem", "books", "read_blocks", "written_blocks", "failed_reads", "failed_writes", "bad_blocks", "evicted_blocks", "hit_tokens", "ignored_records", "read_bytes_per_second", "write_bytes_per_second")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OK: _ClassVar[Tier.State]
        DEGRADED: _ClassVar[Tier.State]
    OK: Tier.State
    DEGRADED: Tier.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    BOOKS_FIELD_NUMBER: _ClassVar[int]
    READ_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAILED_READS_FIELD_NUMBER: _ClassVar[int]
    FAILED_WRITES_FIELD_NUMBER: _ClassVar[int]
    BAD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORED_RECORDS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    WRITE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: Tier.State
    problem: str
    books: Books
    read_blocks: int
    written_blocks: int
    failed_reads: int
    failed_writes: int
    bad_blocks: int
    evicted_blocks: int
    hit_tokens: int
    ignored_records: int
    read_bytes_per_second: float
    write_bytes_per_second: float
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[Tier.State, str]] = ..., problem: _Optional[str] = ..., books: _Optional[_Union[Books, _Mapping]] = ..., read_blocks: _Optional[int] = ..., written_blocks: _Optional[int] = ..., failed_reads: _Optional[int] = ..., failed_writes: _Optional[int] = ..., bad_blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., ignored_records: _Optional[int] = ..., read_bytes_per_second: _Optional[float] = ..., write_bytes_per_second: _Optional[float] = ...) -> None: ...

class Books(_message.Message):
    __slots__ = ("leased", "in_flight", "reserved", "pinned", "cached", "free", "total")
    LEASED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    leased: int
    in_flight: int
    reserved: int
    pinned: int
    cached: int
    free: int
    total: int
    def __init__(self, leased: _Optional[int] = ..., in_flight: _Optional[int] = ..., reserved: _Optional[int] = ..., pinned: _Optional[int] = ..., cached: _Optional[int] = ..., free: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("acquires", "resumed_acquires", "queried_tokens", "hit_tokens", "resumed_queried_tokens", "resumed_hit_tokens", "lookups", "commits", "committed_blocks", "duplicate_blocks", "forks", "copied_blocks", "evicted_blocks", "invalidated_blocks", "preemptions", "exhausted", "waits", "pressure_events", "dropped_blocks", "break_even_acquires")
    ACQUIRES_FIELD_NUMBER: _ClassVar[int]
    RESUMED_ACQUIRES_FIELD_NUMBER: _ClassVar[int]
    QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FORKS_FIELD_NUMBER: _ClassVar[int]
    COPIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    INVALIDATED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BREAK_EVEN_ACQUIRES_FIELD_NUMBER: _ClassVar[int]
    acquires: int
    resumed_acquires: int
    queried_tokens: int
    hit_tokens: int
    resumed_queried_tokens: int
    resumed_hit_tokens: int
    lookups: int
    commits: int
    committed_blocks: int
    duplicate_blocks: int
    forks: int
    copied_blocks: int
    evicted_blocks: int
    invalidated_blocks: int
    preemptions: int
    exhausted: int
    waits: int
    pressure_events: int
    dropped_blocks: int
    break_even_acquires: int
    def __init__(self, acquires: _Optional[int] = ..., resumed_acquires: _Optional[int] = ..., queried_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., resumed_queried_tokens: _Optional[int] = ..., resumed_hit_tokens: _Optional[int] = ..., lookups: _Optional[int] = ..., commits: _Optional[int] = ..., committed_blocks: _Optional[int] = ..., duplicate_blocks: _Optional[int] = ..., forks: _Optional[int] = ..., copied_blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., invalidated_blocks: _Optional[int] = ..., preemptions: _Optional[int] = ..., exhausted: _Optional[int] = ..., waits: _Optional[int] = ..., pressure_events: _Optional[int] = ..., dropped_blocks: _Optional[int] = ..., break_even_acquires: _Optional[int] = ...) -> None: ...

class InvalidateRequest(_message.Message):
    __slots__ = ("namespace", "prefix", "everything", "dry_run", "tag")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    EVERYTHING_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    namespace: NamespaceRef
    prefix: bytes
    everything: bool
    dry_run: bool
    tag: str
    def __init__(self, namespace: _Optional[_Union[NamespaceRef, _Mapping]] = ..., prefix: _Optional[bytes] = ..., everything: _Optional[bool] = ..., dry_run: _Optional[bool] = ..., tag: _Optional[str] = ...) -> None: ...

class InvalidateReply(_message.Message):
    __slots__ = ("removed_blocks", "leased_blocks", "cpu_blocks", "nvme_blocks", "remote_blocks", "failed_erasures")
    REMOVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CPU_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NVME_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAILED_ERASURES_FIELD_NUMBER: _ClassVar[int]
    removed_blocks: int
    leased_blocks: int
    cpu_blocks: int
    nvme_blocks: int
    remote_blocks: int
    failed_erasures: int
    def __init__(self, removed_blocks: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., cpu_blocks: _Optional[int] = ..., nvme_blocks: _Optional[int] = ..., remote_blocks: _Optional[int] = ..., failed_erasures: _Optional[int] = ...) -> None: ...

class SessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionsReply(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ...) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("session_id", "pids", "client", "model_fingerprint", "transport", "num_leases", "num_waiting", "private_blocks", "reserved_blocks", "age_ms", "silent_ms", "alarm")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    SILENT_MS_FIELD_NUMBER: _ClassVar[int]
    ALARM_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    pids: _containers.RepeatedScalarFieldContainer[int]
    client: str
    model_fingerprint: str
    transport: str
    num_leases: int
    num_waiting: int
    private_blocks: int
    reserved_blocks: int
    age_ms: int
    silent_ms: int
    alarm: bool
    def __init__(self, session_id: _Optional[int] = ..., pids: _Optional[_Iterable[int]] = ..., client: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., transport: _Optional[str] = ..., num_leases: _Optional[int] = ..., num_waiting: _Optional[int] = ..., private_blocks: _Optional[int] = ..., reserved_blocks: _Optional[int] = ..., age_ms: _Optional[int] = ..., silent_ms: _Optional[int] = ..., alarm: _Optional[bool] = ...) -> None: ...

class KillSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    def __init__(self, session_id: _Optional[int] = ...) -> None: ...

class KillSessionReply(_message.Message):
    __slots__ = ("freed_blocks",)
    FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    freed_blocks: int
    def __init__(self, freed_blocks: _Optional[int] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("namespace", "tokens", "contents")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    namespace: NamespaceRef
    tokens: bytes
    contents: _containers.RepeatedCompositeFieldContainer[_session_pb2.ContentRange]
    def __init__(self, namespace: _Optional[_Union[NamespaceRef, _Mapping]] = ..., tokens: _Optional[bytes] = ..., contents: _Optional[_Iterable[_Union[_session_pb2.ContentRange, _Mapping]]] = ...) -> None: ...

class PrefetchReply(_message.Message):
    __slots__ = ("handle", "cached_tokens", "loading_tokens", "reason")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    handle: int
    cached_tokens: int
    loading_tokens: int
    reason: _session_pb2.Onboarding.Reason
    def __init__(self, handle: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., loading_tokens: _Optional[int] = ..., reason: _Optional[_Union[_session_pb2.Onboarding.Reason, str]] = ...) -> None: ...

class WaitPrefetchRequest(_message.Message):
    __slots__ = ("handle", "timeout_ms")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    timeout_ms: int
    def __init__(self, handle: _Optional[int] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class WaitPrefetchReply(_message.Message):
    __slots__ = ("done", "loaded_tokens", "failed_tokens")
    DONE_FIELD_NUMBER: _ClassVar[int]
    LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    done: bool
    loaded_tokens: int
    failed_tokens: int
    def __init__(self, done: _Optional[bool] = ..., loaded_tokens: _Optional[int] = ..., failed_tokens: _Optional[int] = ...) -> None: ...

class CancelPrefetchRequest(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class CancelPrefetchReply(_message.Message):
    __slots__ = ("cancelled",)
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    cancelled: bool
    def __init__(self, cancelled: _Optional[bool] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("namespace", "tokens", "contents", "ttl_ms")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    namespace: NamespaceRef
    tokens: bytes
    contents: _containers.RepeatedCompositeFieldContainer[_session_pb2.ContentRange]
    ttl_ms: int
    def __init__(self, namespace: _Optional[_Union[NamespaceRef, _Mapping]] = ..., tokens: _Optional[bytes] = ..., contents: _Optional[_Iterable[_Union[_session_pb2.ContentRange, _Mapping]]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("pin_id", "pinned_tokens")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    PINNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    pin_id: int
    pinned_tokens: int
    def __init__(self, pin_id: _Optional[int] = ..., pinned_tokens: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("pin_id", "namespace", "tokens")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    pin_id: int
    namespace: NamespaceRef
    tokens: bytes
    def __init__(self, pin_id: _Optional[int] = ..., namespace: _Optional[_Union[NamespaceRef, _Mapping]] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class UnpinReply(_message.Message):
    __slots__ = ("num_pins",)
    NUM_PINS_FIELD_NUMBER: _ClassVar[int]
    num_pins: int
    def __init__(self, num_pins: _Optional[int] = ...) -> None: ...

class RetainRequest(_message.Message):
    __slots__ = ("namespace", "prefix", "retention")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    namespace: NamespaceRef
    prefix: bytes
    retention: _session_pb2.Retention
    def __init__(self, namespace: _Optional[_Union[NamespaceRef, _Mapping]] = ..., prefix: _Optional[bytes] = ..., retention: _Optional[_Union[_session_pb2.Retention, _Mapping]] = ...) -> None: ...

class RetainReply(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class NamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NamespacesReply(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceInfo]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceInfo, _Mapping]]] = ...) -> None: ...

class NamespaceInfo(_message.Message):
    __slots__ = ("namespace", "kv_spec", "num_blocks")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KV_SPEC_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    namespace: NamespaceRef
    kv_spec: _session_pb2.KVSpec
    num_blocks: int
    def __init__(self, namespace: _Optional[_Union[NamespaceRef, _Mapping]] = ..., kv_spec: _Optional[_Union[_session_pb2.KVSpec, _Mapping]] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("namespace", "tokens")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    namespace: NamespaceRef
    tokens: bytes
    def __init__(self, namespace: _Optional[_Union[NamespaceRef, _Mapping]] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
