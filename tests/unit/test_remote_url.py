"""URLs of the remote: what each says, and what is wrong with a wrong one."""

import builtins

import pytest

from radixkv.pools import remote_client
from radixkv.pools.remote_client import RemoteUnavailable
from radixkv.pools.remote_url import RemoteUrl, parse_remote_url


def test_the_shortest_stays_on_this_machine():
    url = parse_remote_url("mooncake://127.0.0.1:50051")
    assert url == RemoteUrl("127.0.0.1:50051")
    assert (url.host, url.metadata, url.protocol) == ("127.0.0.1", "P2PHANDSHAKE", "tcp")
    assert (url.segment_bytes, url.replicas, url.is_local) == (1 << 30, 1, True)


def test_everything_can_be_said():
    url = parse_remote_url(
        "mooncake://master.example:50051?host=10.0.0.7&metadata=http://10.0.0.1:8080/metadata"
        "&protocol=rdma&device=mlx5_0,mlx5_1&segment_gib=0.5&replicas=2"
    )
    assert url == RemoteUrl(
        "master.example:50051", "10.0.0.7", "http://10.0.0.1:8080/metadata", "rdma",
        "mlx5_0,mlx5_1", 1 << 29, 2,
    )  # fmt: skip
    assert not url.is_local


@pytest.mark.parametrize("text", ["mooncake://[::1]:50051", "mooncake://localhost:50051/"])
def test_other_names_of_this_machine(text):
    assert parse_remote_url(text).is_local


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "must be a URL"),
        ("mooncake://127.0.0.1:50051\n", "must be a URL"),
        ("redis://127.0.0.1:50051", "scheme 'redis'"),
        ("127.0.0.1:50051", "scheme"),
        ("mooncake://:50051", "no host"),
        ("mooncake://127.0.0.1", "no port"),
        ("mooncake://127.0.0.1:0", "no port"),
        ("mooncake://127.0.0.1:99999", "Port out of range"),
        ("mooncake://127.0.0.1:x", "Port could not be cast"),
        ("mooncake://[::1:50051", "Invalid IPv6"),
        ("mooncake://me:secret@127.0.0.1:50051", "user name or password"),
        ("mooncake://127.0.0.1:50051/pool", "'/pool'"),
        ("mooncake://127.0.0.1:50051#x", "'x'"),
        ("mooncake://127.0.0.1:50051?protocl=tcp", "did you mean protocol?"),
        ("mooncake://127.0.0.1:50051?zzz=1", "known: host, metadata"),
        ("mooncake://127.0.0.1:50051?rdma", "'rdma'"),
        ("mooncake://127.0.0.1:50051?protocol=udp", "protocol='udp'"),
        ("mooncake://127.0.0.1:50051?segment_gib=-1", "segment_gib='-1'"),
        ("mooncake://127.0.0.1:50051?segment_gib=nan", "segment_gib='nan'"),
        ("mooncake://127.0.0.1:50051?segment_gib=4G", "segment_gib='4G'"),
        ("mooncake://127.0.0.1:50051?replicas=0", "replicas='0'"),
        ("mooncake://127.0.0.1:50051?replicas=1.5", "replicas='1.5'"),
        ("mooncake://127.0.0.1:50051?replicas=1&replicas=2", "replicas twice"),
        ("mooncake://127.0.0.1:50051?host=a/b", "host='a/b'"),
        ("mooncake://127.0.0.1:50051?metadata=ftp://x", "metadata='ftp://x'"),
        ("mooncake://10.0.0.1:50051", "needs host=ADDRESS"),
    ],
)
def test_a_wrong_url_names_the_part(text, part):
    with pytest.raises(ValueError) as caught:
        parse_remote_url(text)
    assert part in str(caught.value)
    assert "secret" not in str(caught.value)


def test_without_the_library_the_packages_are_named(monkeypatch):
    original = builtins.__import__

    def refuse(name, *rest):
        if name.startswith("mooncake"):
            raise ImportError("libibverbs.so.1: cannot open shared object file")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RemoteUnavailable) as caught:
        remote_client.load_library()
    for word in ("libibverbs.so.1", "mooncake-transfer-engine-non-cuda", "apt-get", "liburing2"):
        assert word in str(caught.value)
