"""Namespaces as sessions and tools name them, and their keys in the core."""

import logging
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from radixkv.core.errors import Exhausted, FailedPrecondition, InvalidArgument, NotFound
from radixkv.core.namespace import namespace_key
from radixkv.pools.layout import KVSpec, LayoutError
from radixkv.server.spec_wire import kv_spec_to_proto
from radixkv.v1 import cache_pb2
from radixkv.v1 import session_pb2 as pb
from radixkv.wire import limits

log = logging.getLogger(__name__)

MAX_CACHED_SCOPES = 1024  # of one session
MAX_MODELS = 1024  # pairs of model and KVSpec that a server has seen

_FIELD = struct.Struct("<BI")  # tag and length, as namespace_key writes them


class NamespaceFields(NamedTuple):
    """What a namespace key is made of."""

    model: str
    kv_spec: bytes
    adapter: str
    adapter_version: str
    salt: str


def parse_namespace_key(key: bytes) -> NamespaceFields:
    """The fields that `namespace_key` gives exactly this key for; raises InvalidArgument."""
    values = []
    at = 0
    try:
        for _ in NamespaceFields._fields:
            _, size = _FIELD.unpack_from(key, at)
            at += _FIELD.size
            values.append(key[at : at + size])
            at += size
        model, kv_spec, *scope = values
        fields = NamespaceFields(model.decode(), kv_spec, *(value.decode() for value in scope))
    except (struct.error, UnicodeDecodeError):
        raise InvalidArgument("this is not a namespace key") from None
    if namespace_key(**fields._asdict()) != key:
        raise InvalidArgument("this is not a namespace key")
    return fields


def namespace_info(key: bytes, num_blocks: int) -> cache_pb2.NamespaceInfo:
    """A namespace as tools see it; raises InvalidArgument."""
    fields = parse_namespace_key(key)
    info = cache_pb2.NamespaceInfo(num_blocks=num_blocks)
    info.namespace.model_fingerprint = fields.model
    info.namespace.scope.adapter = fields.adapter
    info.namespace.scope.adapter_version = fields.adapter_version
    info.namespace.scope.salt = fields.salt
    try:
        info.kv_spec.CopyFrom(kv_spec_to_proto(KVSpec.decode(fields.kv_spec)))
    except LayoutError as error:
        raise InvalidArgument(str(error)) from None
    return info


class SessionNamespaces:
    """Namespace keys of one model under one KVSpec, by scope; a bounded cache of them."""

    __slots__ = ("_by_scope", "_kv_spec", "_model", "base", "placeholder_tokens")

    def __init__(self, model: str, kv_spec: bytes, placeholder_tokens: frozenset[int]) -> None:
        self._model = model
        self._kv_spec = kv_spec
        self._by_scope: dict[bytes, bytes] = {}
        self.placeholder_tokens = placeholder_tokens
        self.base = namespace_key(model=model, kv_spec=kv_spec)

    def of(self, scope: pb.Scope) -> bytes:
        """Key of a scope. Raises InvalidArgument for a field that is too long or missing."""
        encoded = scope.SerializeToString()
        key = self._by_scope.get(encoded)
        if key is None:
            _check_scope(scope)
            key = namespace_key(
                model=self._model,
                kv_spec=self._kv_spec,
                adapter=scope.adapter,
                adapter_version=scope.adapter_version,
                salt=scope.salt,
            )
            if len(self._by_scope) >= MAX_CACHED_SCOPES:
                self._by_scope.clear()
            self._by_scope[encoded] = key
        return key


class Models:
    """Every model that said Hello since the server started or whose blocks were restored, for tools
    that name one.

    What a model cached outlives its sessions, so entries stay.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], SessionNamespaces] = {}

    def add(
        self, model: str, kv_spec: bytes, placeholder_tokens: frozenset[int]
    ) -> SessionNamespaces:
        """Remember a model. Raises Exhausted above MAX_MODELS.

        For tools, placeholder tokens stay known when a session without any (a tool's) comes.
        """
        key = (model, kv_spec)
        known = self._known.get(key)
        if known is not None and known.placeholder_tokens == placeholder_tokens:
            return known
        if known is None and len(self._known) >= MAX_MODELS:
            raise Exhausted(f"this server has seen {MAX_MODELS} models and KVSpecs; restart it")
        namespaces = SessionNamespaces(model, kv_spec, placeholder_tokens)
        if known is None or placeholder_tokens:
            self._known[key] = namespaces
        return namespaces

    def add_restored(self, namespace_keys: Iterable[bytes]) -> None:
        """Remember the models of blocks that outlived a restart, up to MAX_MODELS of them."""
        for key in namespace_keys:
            try:
                fields = parse_namespace_key(key)
                if (fields.model, fields.kv_spec) not in self._known:
                    self.add(fields.model, fields.kv_spec, frozenset())
            except (InvalidArgument, Exhausted) as error:
                log.warning("tools cannot name a restored namespace: %s", error)

    def resolve(self, ref: cache_pb2.NamespaceRef) -> Iterator[tuple[bytes, frozenset[int]]]:
        """Keys (one per KVSpec of the model) and placeholder tokens that a tool's name stands for.

        Raises NotFound for an unknown model, FailedPrecondition if it must be named.
        """
        model = ref.model_fingerprint
        names = sorted({name for name, _ in self._known})
        if not model:
            if len(names) > 1:
                raise FailedPrecondition(f"{len(names)} models are known; name one of them")
            model = names[0] if names else ""
        if model not in names:
            raise NotFound(f"this server knows no model {model!r}: none has said Hello")
        for (name, _), namespaces in list(self._known.items()):
            if name == model:
                yield namespaces.of(ref.scope), namespaces.placeholder_tokens


def _check_scope(scope: pb.Scope) -> None:
    for name, maximum in (
        ("adapter", limits.MAX_ADAPTER_BYTES),
        ("adapter_version", limits.MAX_ADAPTER_BYTES),
        ("salt", limits.MAX_SALT_BYTES),
    ):
        size = len(getattr(scope, name).encode())
        if size > maximum:
            raise InvalidArgument(f"scope.{name} is {size} bytes long, at most {maximum} allowed")
