"""What the remote store does when its library hangs, fails or lies; without the library."""

import threading
import time

import numpy as np
import pytest

from radixkv.pools import remote, remote_client
from radixkv.pools.remote_calls import BoundedCalls
from radixkv.pools.remote_client import RemoteUnavailable
from tests.remote_rig import BLOCK_BYTES, DONE, FAILED, NAMESPACE, digests, get, identity, put

URL = "mooncake://127.0.0.1:50051"
FEW, MANY = range(4), range(40)


class FakeClient:
    """Objects in a dict; every call first waits for `gate` and looks for a failure."""

    def __init__(self, *_: object) -> None:
        self.objects: dict[str, bytes] = {}
        self.records: dict[int, np.ndarray] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.connects = True
        self.is_connected = False
        self.code = 0
        self.calls = 0

    def connect(self) -> None:
        self.gate.wait()
        if not self.connects:
            raise RemoteUnavailable("no connection")
        self.is_connected = True

    def put(self, keys: list[str], addresses: list[int], size: int) -> list[int]:
        return self._each(keys, lambda at: self._put(keys[at], addresses[at]))

    def get(self, keys: list[str], addresses: list[int], size: int) -> list[int]:
        return self._each(keys, lambda at: self._get(keys[at], addresses[at]))

    def exist(self, keys: list[str]) -> list[int]:
        return self._each(keys, lambda at: int(keys[at] in self.objects))

    def remove(self, keys: list[str], starts: list[str]) -> list[int]:
        for start in starts:
            for key in [key for key in self.objects if key.startswith(start)]:
                del self.objects[key]
        return self._each(keys, lambda at: 0 if self.objects.pop(keys[at], b"") else -704)

    def close(self) -> None:
        self.is_connected = False

    def _each(self, keys, act) -> list[int]:
        self.calls += 1
        self.gate.wait()
        return [self.code or act(at) for at in range(len(keys))]

    def _put(self, key: str, address: int) -> int:
        self.objects[key] = self.records[address].tobytes()
        return 0

    def _get(self, key: str, address: int) -> int:
        data = self.objects.get(key)
        if data is None:
            return remote_client.NOT_FOUND
        self.records[address][:] = np.frombuffer(data, np.uint8)
        return len(data)


@pytest.fixture
def client(monkeypatch) -> FakeClient:
    client = FakeClient()
    monkeypatch.setattr(remote, "MooncakeClient", lambda *_: client)
    for name in ("CONNECT_TIMEOUT_S", "TRANSFER_TIMEOUT_S", "PROBE_TIMEOUT_S", "REMOVE_TIMEOUT_S"):
        monkeypatch.setattr(remote, name, 0.1)
    monkeypatch.setattr(remote, "FIRST_BACKOFF_S", 0.02)
    return client


def open_store(client: FakeClient) -> remote.RemoteStore:
    store = remote.RemoteStore(URL, BLOCK_BYTES, 4)
    client.records = {record.ctypes.data: record for record in store._records}
    return store


def up_again(store: remote.RemoteStore) -> None:
    deadline = time.monotonic() + 5
    while store._calls.is_busy or time.monotonic() < store._retry_at_s:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_calls_are_made_in_order_by_one_thread():
    calls, threads = BoundedCalls("test"), []
    futures = [calls.start(lambda: threads.append(threading.get_ident())) for _ in range(5)]
    assert [future.result(1) for future in futures] == [None] * 5
    assert len(set(threads)) == 1 and not calls.is_busy
    with pytest.raises(ZeroDivisionError):
        calls.call(lambda: 1 // 0, 1)
    assert calls.call(lambda: 5, 1) == 5
    calls.close()


def test_a_call_that_hangs_is_left_alone_and_nothing_follows_it():
    calls, gate = BoundedCalls("test"), threading.Event()
    with pytest.raises(TimeoutError):
        calls.call(gate.wait, 0.01)
    following = calls.start(lambda: pytest.fail("it was given up"))
    calls.give_up()
    assert calls.is_busy and following.cancelled()
    gate.set()
    assert calls.call(lambda: 5, 1) == 5
    calls.close()


def test_blocks_of_several_halves(client):
    store = open_store(client)
    assert put(store, MANY) == [DONE] * len(MANY)
    assert client.calls == 3
    assert get(store, MANY) == [DONE] * len(MANY)
    assert store.probe(digests(range(41))) == [True] * 40 + [False]
    assert store.problem is None


@pytest.mark.parametrize("hanging", ["put", "get", "probe", "remove"])
def test_while_a_call_hangs_everything_fails_at_once_and_no_thread_is_added(client, hanging):
    store = open_store(client)
    put(store, FEW)
    client.gate.clear()
    calls = {
        "put": lambda: put(store, MANY) == [FAILED] * len(MANY),
        "get": lambda: get(store, MANY) == [FAILED] * len(MANY),
        "probe": lambda: store.probe(digests(FEW)) is None,
        "remove": lambda: store.remove(digests(FEW)) is False,
    }
    assert calls[hanging]()
    before, made = threading.active_count(), client.calls
    time.sleep(0.05)  # longer than the pause
    assert all(call() for call in calls.values())
    assert (threading.active_count(), client.calls) == (before, made)
    assert "did not end" in (store.problem or "")
    client.gate.set()
    up_again(store)
    assert put(store, FEW) == [DONE] * 4
    assert get(store, FEW) == [DONE] * 4


def test_c3_a_call_that_ends_late_changes_no_block(client):
    store = open_store(client)
    put(store, FEW)
    client.gate.clear()
    into = [np.full(BLOCK_BYTES, 0xAB, np.uint8) for _ in FEW]
    assert store.read(NAMESPACE, [identity(n) for n in FEW], into) == [FAILED] * 4
    client.gate.set()
    up_again(store)
    assert all((block == 0xAB).all() for block in into)


@pytest.mark.parametrize("code", [remote_client.RPC_FAILED, remote_client.RPC_TIMED_OUT])
def test_a_master_that_fails_is_tried_again_after_longer_and_longer_pauses(client, code):
    store = open_store(client)
    put(store, FEW)
    client.code = code
    pauses = []
    for _ in range(4):
        up_again(store)
        assert store.probe(digests(FEW)) is None
        pauses.append(store._backoff_s)
        made = client.calls
        assert get(store, FEW) == [FAILED] * 4 and client.calls == made
    assert pauses == [0.02, 0.04, 0.08, 0.16]
    client.code = 0
    up_again(store)
    assert get(store, FEW) == [DONE] * 4
    client.code = code
    assert store.probe(digests(FEW)) is None and store._backoff_s == 0.02


def test_a_connection_that_comes_late_is_taken(client):
    client.gate.clear()
    store = open_store(client)
    assert put(store, FEW) == [FAILED] * 4
    client.gate.set()
    up_again(store)
    assert put(store, FEW) == [DONE] * 4


def test_a_connection_is_tried_again(client):
    client.connects = False
    store = open_store(client)
    assert store.problem == "no connection" and store.probe(digests(FEW)) is None
    client.connects = True
    up_again(store)
    assert store.probe(digests(FEW)) == [False] * 4


@pytest.mark.parametrize(
    "code", [remote_client.NO_SPACE, remote_client.TRANSFER_FAILED, remote_client.LEASE_EXPIRED, -1]
)
def test_c4_other_failures_are_those_of_the_block(client, code):
    store = open_store(client)
    put(store, FEW)
    client.code = code
    assert put(store, FEW) == [FAILED] * 4
    assert get(store, FEW) == [FAILED] * 4
    assert store.problem and store._backoff_s == 0
    client.code = 0
    assert get(store, FEW) == [DONE] * 4
    client.code = code
    assert not store.remove(digests(FEW))
