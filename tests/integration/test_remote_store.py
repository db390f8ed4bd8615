"""The remote store against a real master and real peers: sharing, damage, deaths."""

import signal
import socket
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from radixkv.pools import remote_client
from radixkv.pools.remote import RemoteStore, key_of
from tests.mooncake_master import MasterProcess, PeerProcess, needs_mooncake
from tests.remote_rig import (
    BAD,
    BLOCK_BYTES,
    DONE,
    FAILED,
    NAMESPACE,
    digests,
    get,
    identity,
    open_store,
    payload,
    put,
)

pytestmark = needs_mooncake
MANY = range(40)  # three halves of the buffer
FEW = range(4)


@pytest.fixture(scope="module")
def master() -> Iterator[MasterProcess]:
    """For tests that do no harm to it."""
    with MasterProcess() as process:
        yield process


@pytest.fixture(scope="module")
def shared_store(master: MasterProcess) -> Iterator[RemoteStore]:
    store = open_store(master.url(segment_gib=0.25))
    yield store
    store.close()


@pytest.fixture
def store(shared_store: RemoteStore) -> RemoteStore:
    """With nothing in it."""
    assert shared_store.remove(digests(MANY)), shared_store.problem
    shared_store.problem = None
    return shared_store


@pytest.fixture
def own_master() -> Iterator[MasterProcess]:
    """One whose members may die; it notices soon."""
    with MasterProcess("--client_ttl=2") as process:
        yield process


def timed(call: Callable[[], object]) -> tuple[object, float]:
    start = time.monotonic()
    result = call()
    return result, time.monotonic() - start


def eventually(call: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not call():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_blocks_come_back_as_they_were(store):
    assert store.probe(digests(MANY)) == [False] * len(MANY)
    assert put(store, MANY) == [DONE] * len(MANY)
    assert store.probe(digests(MANY)) == [True] * len(MANY)
    assert get(store, MANY) == [DONE] * len(MANY)
    assert put(store, MANY) == [DONE] * len(MANY), "what is there is not an error"
    assert get(store, range(39, -1, -1)) == [DONE] * len(MANY)


def test_nothing_is_nothing(store):
    assert put(store, range(0)) == get(store, range(0)) == store.probe([]) == []
    assert store.remove([])


def test_what_is_absent_is_bad_and_ends_the_run(store):
    put(store, range(20))
    assert get(store, range(18, 22)) == [DONE, DONE, BAD, BAD]
    assert get(store, MANY)[:20] == [DONE] * 20
    assert DONE not in get(store, MANY)[20:]


def test_d7_removed_is_removed_even_while_it_is_read(store):
    put(store, FEW)
    get(store, FEW)  # gives them a lease at the master
    assert store.remove(digests(FEW))
    assert store.probe(digests(FEW)) == [False] * 4
    assert get(store, FEW) == [BAD] * 4
    assert store.remove(digests(FEW)), "twice does no harm"
    assert put(store, FEW) == [DONE] * 4
    assert get(store, FEW) == [DONE] * 4


def test_a6_another_process_has_the_same_keys(own_master):
    """And the memory is the peer's, so all of it goes over the wire."""
    store = open_store(own_master.url(segment_gib=0))
    with PeerProcess(own_master.url(segment_gib=0.25), BLOCK_BYTES, MANY) as peer:
        assert store.probe(digests(MANY)) == [True] * len(MANY)
        assert get(store, MANY) == [DONE] * len(MANY)
        more = range(40, 60)
        assert put(store, more) == [DONE] * 20
        assert get(store, more) == [DONE] * 20
        assert store.remove(digests(range(10)))
        peer.leave()
    eventually(lambda: store.probe(digests(range(60))) == [False] * 60)
    store.close()


# ---- content that is not what it should be ---------------------------------------------------


def test_c5_bytes_that_do_not_match_their_checksum(store):
    block = payload(1)
    wrong = xxh3_64_intdigest(block.data) ^ 1
    assert store.write(NAMESPACE, [identity(1)], [block], [wrong]) == [DONE]
    put(store, range(2, 4))
    assert get(store, range(1, 4)) == [BAD, DONE, DONE]
    assert store.probe(digests(range(1, 4))) == [False, True, True]
    assert put(store, range(1, 2)) == [DONE]
    assert get(store, range(1, 4)) == [DONE] * 3


def test_a1_another_block_under_this_name(store):
    """As a colliding digest would look: other tokens, another parent, another namespace."""
    block = payload(1)
    checksum = xxh3_64_intdigest(block.data)
    right = identity(1)
    for namespace, forged in (
        (b"other", right),
        (NAMESPACE, right._replace(tokens=identity(2).tokens)),
        (NAMESPACE, right._replace(parent=identity(2).digest)),
    ):
        assert store.write(namespace, [forged], [block], [checksum]) == [DONE]
        assert get(store, range(1, 2)) == [BAD]
        assert "foreign" in (store.problem or "")
        assert store.probe(digests(range(1, 2))) == [False]


@pytest.mark.parametrize("num_bytes", [BLOCK_BYTES - 8192, BLOCK_BYTES + 8, BLOCK_BYTES + 8192])
def test_a7_objects_of_another_layout(master, store, num_bytes):
    other = open_store(master.url(segment_gib=0.25), num_bytes)
    assert put(other, FEW, num_bytes) == [DONE] * 4
    assert get(store, FEW) == [BAD] * 4
    assert store.probe(digests(FEW)) == [False] * 4
    other.close()


@pytest.mark.parametrize("num_bytes", [1, 4096, 8192 + (1 << 19)])
def test_g2_objects_that_are_no_records(store, num_bytes):
    junk = np.full(num_bytes, 0x80, np.uint8)
    client = store._client
    key = key_of(identity(1).digest)
    assert client.put([key], [junk.ctypes.data], num_bytes) == [remote_client.OK]
    assert get(store, range(1, 2)) == [BAD]
    assert store.probe(digests(range(1, 2))) == [False]


# ---- masters and peers that do not answer ----------------------------------------------------


def test_a_stopped_master_costs_bounded_time_once(own_master):
    store = open_store(own_master.url(segment_gib=0.25))
    assert put(store, FEW) == [DONE] * 4
    own_master.signal(signal.SIGSTOP)
    try:
        found, first_s = timed(lambda: store.probe(digests(FEW)))
        assert found is None and first_s < 1.0
        for call in (
            lambda: store.probe(digests(FEW)) is None,
            lambda: get(store, FEW) == [FAILED] * 4,
            lambda: put(store, FEW) == [FAILED] * 4,
            lambda: store.remove(digests(FEW)) is False,
        ):
            holds, took_s = timed(call)
            assert holds and took_s < 0.2, "while it is down, all fails at once"
        assert store.problem
        eventually(lambda: not store._calls.is_busy and time.monotonic() > store._retry_at_s)
        outcomes, took_s = timed(lambda: get(store, FEW))
        assert outcomes == [FAILED] * 4 and took_s < 7.0
    finally:
        own_master.signal(signal.SIGCONT)
    eventually(lambda: store.probe(digests(FEW)) is not None)
    eventually(lambda: put(store, FEW) == [DONE] * 4)
    assert get(store, FEW) == [DONE] * 4
    store.close()


def test_a_master_that_is_killed_and_comes_back_has_forgotten(own_master):
    store = open_store(own_master.url(segment_gib=0.25))
    assert put(store, MANY) == [DONE] * len(MANY)
    own_master.kill()
    found, took_s = timed(lambda: store.probe(digests(MANY)))
    assert found is None and took_s < 1.0
    outcomes, took_s = timed(lambda: get(store, MANY))
    assert outcomes == [FAILED] * len(MANY) and took_s < 7.0
    own_master.restart()
    eventually(lambda: store.probe(digests(MANY)) == [False] * len(MANY))
    eventually(lambda: put(store, MANY) == [DONE] * len(MANY))
    assert get(store, MANY) == [DONE] * len(MANY)
    store.close()


@pytest.mark.slow
def test_a_master_that_is_not_there_at_first(own_master):
    own_master.kill()
    store, took_s = timed(lambda: open_store(own_master.url(segment_gib=0.25)))
    assert isinstance(store, RemoteStore) and took_s < 7.0
    assert store.problem and str(own_master.port) in store.problem
    assert store.probe(digests(FEW)) is None
    own_master.restart()
    eventually(lambda: put(store, FEW) == [DONE] * 4)
    assert get(store, FEW) == [DONE] * 4
    store.close()


def test_c3_a_read_that_was_given_up_writes_no_more(own_master):
    """The peer that holds the blocks stops in the middle, and goes on when they are not ours."""
    store = open_store(own_master.url(segment_gib=0))
    with PeerProcess(own_master.url(segment_gib=0.25), BLOCK_BYTES, MANY) as peer:
        assert get(store, MANY) == [DONE] * len(MANY)
        peer.signal(signal.SIGSTOP)
        into = [np.full(BLOCK_BYTES, 0xAB, np.uint8) for _ in MANY]
        names = [identity(number) for number in MANY]
        outcomes, took_s = timed(lambda: store.read(NAMESPACE, names, into))
        assert outcomes == [FAILED] * len(MANY) and took_s < 14.0
        peer.signal(signal.SIGCONT)
        time.sleep(0.5)
        assert all((block == 0xAB).all() for block in into)
        eventually(lambda: get(store, FEW) != [FAILED] * 4)
    store.close()


def test_a_killed_peer_is_a_failure_and_then_a_miss(own_master, capfd):
    store = open_store(own_master.url(segment_gib=0))
    with PeerProcess(own_master.url(segment_gib=0.25), BLOCK_BYTES, FEW) as peer:
        peer.close()
    outcomes, took_s = timed(lambda: get(store, FEW))
    assert DONE not in outcomes and took_s < 7.0
    eventually(lambda: store.probe(digests(FEW)) == [False] * 4)
    assert get(store, FEW) == [BAD] * 4
    store.close()
    printed = capfd.readouterr()
    assert not any(digest.hex() in printed.out + printed.err for digest in digests(FEW))


def test_a_replica_outlives_the_peer_with_the_other_one(own_master):
    with PeerProcess(own_master.url(segment_gib=0.25), BLOCK_BYTES, range(0)) as peer:
        store = open_store(own_master.url(segment_gib=0.25, replicas=2))
        assert put(store, FEW) == [DONE] * 4
        peer.close()
        eventually(lambda: get(store, FEW) == [DONE] * 4)
    store.close()


# ---- ends ------------------------------------------------------------------------------------


def test_g2_nothing_listens_beyond_loopback(store):
    """Mooncake listens on all addresses; the sockets are bound to the loopback device instead."""
    put(store, FEW)
    descriptors = remote_client._listening()
    assert descriptors, "it does listen; else this test looks for the wrong thing"
    for descriptor in descriptors:
        with socket.socket(fileno=descriptor) as other:
            device = other.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
            other.detach()
        assert device == b"lo\0"


def test_c4_a_cluster_without_room_says_so_and_after_close_all_fails_at_once(own_master):
    store = open_store(own_master.url(segment_gib=0))
    assert put(store, FEW) == [FAILED] * 4
    assert "no memory" in (store.problem or "")
    assert store.probe(digests(FEW)) == [False] * 4
    store.close()
    assert store.probe(digests(FEW)) is None
    assert put(store, FEW) == get(store, FEW) == [FAILED] * 4
    assert not store.remove(digests(FEW))
    store.close()
