"""Namespaces as sessions and tools name them, and their keys in the core."""

from collections.abc import Iterator

from radixkv.core.errors import Exhausted, FailedPrecondition, InvalidArgument, NotFound
from radixkv.core.namespace import namespace_key
from radixkv.v1 import cache_pb2
from radixkv.v1 import session_pb2 as pb
from radixkv.wire import limits

MAX_CACHED_SCOPES = 1024  # of one session
MAX_MODELS = 1024  # pairs of model and KVSpec that a server has seen


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
    """Every model that said Hello since the server started, for tools that name one.

    What a model cached outlives its sessions, so entries stay.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], SessionNamespaces] = {}

    def add(
        self, model: str, kv_spec: bytes, placeholder_tokens: frozenset[int]
    ) -> SessionNamespaces:
        """Remember a model. Raises Exhausted above MAX_MODELS."""
        key = (model, kv_spec)
        known = self._known.get(key)
        if known is not None and known.placeholder_tokens == placeholder_tokens:
            return known
        if known is None and len(self._known) >= MAX_MODELS:
            raise Exhausted(f"this server has seen {MAX_MODELS} models and KVSpecs; restart it")
        self._known[key] = SessionNamespaces(model, kv_spec, placeholder_tokens)
        return self._known[key]

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
            raise NotFound(f"no model {model!r} has said Hello to this server")
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
