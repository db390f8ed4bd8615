"""Namespace keys and encoded KVSpecs, read back; models that nobody said Hello for."""

import pytest

from radixkv.core.errors import InvalidArgument
from radixkv.core.namespace import namespace_key
from radixkv.pools.layout import KVSpec, LayoutError
from radixkv.server.namespaces import (
    Models,
    NamespaceFields,
    namespace_info,
    parse_namespace_key,
)
from radixkv.server.spec_wire import kv_spec_to_proto
from radixkv.v1 import cache_pb2
from radixkv.v1 import session_pb2 as pb

SPEC = KVSpec(2, 1, 576, 0, "bfloat16", 16, backend="a=1:;b", scale_bytes=64)
FIELDS = [
    NamespaceFields("model", SPEC.encode(), "", "", ""),
    NamespaceFields("mödel", SPEC.encode(), "ada", "2", "säl\0t"),
    NamespaceFields("", b"", "", "", ""),
    NamespaceFields("x" * 300, b"\xff" * 300, "a", "b", "c"),
]


@pytest.mark.parametrize("fields", FIELDS)
def test_a_key_is_read_back_to_its_fields(fields: NamespaceFields) -> None:
    assert parse_namespace_key(namespace_key(**fields._asdict())) == fields


def test_what_is_no_key_is_refused() -> None:
    key = namespace_key(**FIELDS[1]._asdict())
    bad = [b"", key + b"x", b"\x01" + b"\xff" * 8, key.replace(b"\x01", b"\x02", 1)]
    bad += [key[:size] for size in range(len(key))]
    bad += [key[:at] + bytes([key[at] ^ 0x80]) + key[at + 1 :] for at in range(len(key))]
    for data in bad:
        try:
            fields = parse_namespace_key(data)
        except InvalidArgument:
            continue
        assert namespace_key(**fields._asdict()) == data, "another key, read as what it is"


@pytest.mark.parametrize("spec", [SPEC, KVSpec(32, 8, 128, 128, "float16", 16)])
def test_an_encoded_spec_is_read_back(spec: KVSpec) -> None:
    assert KVSpec.decode(spec.encode()) == spec


def test_what_is_no_encoded_spec_is_refused() -> None:
    data = SPEC.encode()
    bad = [b"", b"spec", data + b";", data[:-1], data.replace(b"=1:2;", b"=1:x;", 1)]
    bad += [data.replace(b"=1:2;", b"=2:02;", 1), data.replace(b"=1:2;", b"=9999:2;", 1)]
    bad += [data.replace(b"num_layers=1:2;", b"num_layers=30:" + b"9" * 30 + b";", 1)]
    bad += [data[:size] for size in range(len(data))]
    for broken in bad:
        with pytest.raises(LayoutError):
            KVSpec.decode(broken)


def test_info_names_everything() -> None:
    info = namespace_info(namespace_key(**FIELDS[1]._asdict()), 7)
    assert info.namespace.model_fingerprint == "mödel"
    assert info.namespace.scope == pb.Scope(adapter="ada", adapter_version="2", salt="säl\0t")
    assert (info.num_blocks, info.kv_spec) == (7, kv_spec_to_proto(SPEC))
    with pytest.raises(InvalidArgument):
        namespace_info(namespace_key(model="m", kv_spec=b"spec"), 7)


def test_restored_models_can_be_named_before_any_hello(caplog: pytest.LogCaptureFixture) -> None:
    models = Models()
    keys = [namespace_key(**fields._asdict()) for fields in FIELDS[:2]]
    models.add_restored([*keys, b"broken"])
    assert "not a namespace key" in caplog.text
    scope = pb.Scope(adapter="ada", adapter_version="2", salt="säl\0t")
    ref = cache_pb2.NamespaceRef(model_fingerprint="mödel", scope=scope)
    assert list(models.resolve(ref)) == [(keys[1], frozenset())]
    declared = models.add("model", SPEC.encode(), frozenset({7}))
    models.add_restored(keys)
    ref = cache_pb2.NamespaceRef(model_fingerprint="model")
    assert list(models.resolve(ref)) == [(declared.base, frozenset({7}))]


def test_a_session_without_placeholder_tokens_takes_them_from_nobody() -> None:
    models = Models()
    models.add("model", b"spec", frozenset({7}))
    tool = models.add("model", b"spec", frozenset())
    assert tool.placeholder_tokens == frozenset()
    ref = cache_pb2.NamespaceRef(model_fingerprint="model")
    assert list(models.resolve(ref)) == [(tool.base, frozenset({7}))]
