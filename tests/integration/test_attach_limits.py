"""The attach socket's own limits, with short times: a server in this process, real sockets."""

import asyncio
import socket
import types

import pytest

from radixkv.core.results import CacheConfig
from radixkv.server import attach, processes
from radixkv.server.attach import AttachServer
from radixkv.server.pool_host import PoolHost
from radixkv.server.runtime import Runtime
from radixkv.v1 import session_pb2 as pb
from radixkv.wire import limits
from radixkv.wire.framing import FrameDecoder, encode
from tests.session_rig import acquire
from tests.wire_peer import SPEC

NUM_BLOCKS = 16
TIMEOUT_S = 5.0


class Peer:
    """An asyncio client of raw frames."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.decoder = FrameDecoder()
        self.inbox = []
        self.token = b""

    @classmethod
    async def connect(cls, path):
        peer = cls(*await asyncio.open_unix_connection(str(path)))
        first = await peer.receive()
        peer.token = first.attached.session_token
        peer.first = first
        return peer

    async def receive(self):
        while not self.inbox:
            data = await asyncio.wait_for(self.reader.read(1 << 16), TIMEOUT_S)
            if not data:
                return None
            self.inbox += self.decoder.feed(data)
        return pb.ServerMessage.FromString(self.inbox.pop(0))

    def send(self, **message):
        self.writer.write(encode(pb.ClientMessage(**message)))

    async def hello(self, token=b"", **fields):
        self.send(hello=pb.Hello(session_token=token or self.token, protocol_version=1,
                                 model_fingerprint="model", kv_spec=SPEC, **fields))  # fmt: skip
        reply = (await self.receive()).hello
        if not reply.status.code:
            assert (await self.receive()).pools.pools
        return reply

    async def lease(self, number=1, lease_id=1):
        ops = [acquire(lease_id, range(lease_id * 100, lease_id * 100 + 8))]
        self.send(step=pb.Step(number=number, ops=ops))
        return (await self.receive()).replies.replies[0]

    async def lease_after_pools(self, sent=False):
        if not sent:
            self.send(step=pb.Step(number=1, ops=[acquire(7, range(700, 708))]))
        while (message := await self.receive()).WhichOneof("message") == "pools":
            pass
        return message.replies.replies[0]

    def close(self):
        self.writer.close()


def with_server(scenario, tmp_path, **settings):
    """Run `scenario(runtime, path)` beside a server; afterwards nothing is leased."""

    async def main():
        defaults = {"session_alarm": 0.0, "check_invariants": True, "socket_dir": tmp_path}
        pool_host = PoolHost(NUM_BLOCKS, 4)
        config = CacheConfig(NUM_BLOCKS, 4)
        runtime = Runtime(config, pool_host, types.SimpleNamespace(**(defaults | settings)))
        server = AttachServer(runtime, tmp_path / "attach.sock")
        await server.start()
        try:
            await asyncio.wait_for(scenario(runtime, tmp_path / "attach.sock"), 20)
        finally:
            await server.stop()
            pool_host.close()
        assert runtime.num_leases == 0 and len(runtime.sessions) == 0

    asyncio.run(main())


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen in time")


def test_who_says_no_hello_is_sent_away(tmp_path, monkeypatch):
    monkeypatch.setattr(attach, "HELLO_TIMEOUT_S", 0.05)

    async def scenario(runtime, path):
        silent, speaking = await Peer.connect(path), await Peer.connect(path)
        await speaking.hello()
        assert "no Hello" in (await silent.receive()).ended.status.message
        assert await silent.receive() is None
        await asyncio.sleep(0.1)
        assert not (await speaking.lease()).status.code

    with_server(scenario, tmp_path)


def test_connections_and_sessions_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(attach, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr("radixkv.wire.limits.MAX_SESSIONS", 2)

    async def scenario(runtime, path):
        peers = [await Peer.connect(path) for _ in range(3)]
        turned_away = await Peer.connect(path)
        assert turned_away.first.ended.status.code == pb.EXHAUSTED
        assert await turned_away.receive() is None
        statuses = [(await peer.hello()).status.code for peer in peers]
        assert statuses == [pb.OK, pb.OK, pb.EXHAUSTED]
        peers[0].send(bye=pb.Bye())
        assert (await peers[0].receive()).ended.status.code == pb.OK
        await until(lambda: len(runtime.sessions) == 1)
        again = await Peer.connect(path)
        assert (await again.hello()).status.code == pb.OK

    with_server(scenario, tmp_path)


def test_another_user_is_turned_away(tmp_path, monkeypatch):
    stranger = processes.Peer(pid=1, uid=54321)
    monkeypatch.setattr(attach, "peer_of", lambda connection: stranger)

    async def scenario(runtime, path):
        peer = await Peer.connect(path)
        assert peer.first.ended.status.code == pb.PERMISSION_DENIED
        assert await peer.receive() is None

    with_server(scenario, tmp_path)


def test_the_socket_is_for_this_user_only(tmp_path):
    async def scenario(runtime, path):
        assert path.stat().st_mode & 0o777 == 0o600

    with_server(scenario, tmp_path)


def test_without_a_pidfd_the_end_of_file_ends_the_session(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "open_pidfd", lambda connection, pid: None)

    async def scenario(runtime, path):
        peer = await Peer.connect(path)
        await peer.hello()
        await peer.lease()
        assert runtime.num_leases == 1
        peer.close()
        await until(lambda: len(runtime.sessions) == 0 and runtime.num_leases == 0)

    with_server(scenario, tmp_path)


def test_without_a_pidfd_a_failed_session_keeps_its_blocks_until_end_of_file(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(processes, "open_pidfd", lambda connection, pid: None)

    async def scenario(runtime, path):
        peer = await Peer.connect(path)
        await peer.hello()
        await peer.lease()
        peer.send(step=pb.Step(number=9))
        assert (await peer.receive()).ended.status.code == pb.INVALID_ARGUMENT
        assert await peer.receive() is None, "closed on the server's side only"
        await asyncio.sleep(0.05)
        assert runtime.num_leases == 1
        peer.close()
        await until(lambda: runtime.num_leases == 0)

    with_server(scenario, tmp_path)


def test_with_a_pidfd_a_failed_session_keeps_its_blocks_while_the_process_lives(tmp_path):
    async def scenario(runtime, path):
        peer = await Peer.connect(path)
        await peer.hello()
        await peer.lease()
        peer.send(step=pb.Step(number=9))
        assert (await peer.receive()).ended.status.code == pb.INVALID_ARGUMENT
        peer.close()
        again = await Peer.connect(path)
        refused = await again.hello(token=peer.token, resume=True)
        assert refused.status.code == pb.FAILED_PRECONDITION
        assert runtime.num_leases == 1
        fresh = await Peer.connect(path)
        await fresh.hello()
        await fresh.lease(lease_id=2)
        assert runtime.num_leases == 2

    with_server(scenario, tmp_path)


def test_a_peer_that_does_not_read_is_cut_off_and_can_resume(tmp_path, monkeypatch):
    monkeypatch.setattr(attach, "MAX_UNSENT_BYTES", 4096)
    monkeypatch.setattr(attach, "SLOW_READER_TIMEOUT_S", 0.1)

    async def scenario(runtime, path):
        peer = await Peer.connect(path)
        await peer.hello()
        (session,) = runtime.sessions
        peer.writer.transport.pause_reading()
        # What goes out to it without its asking: more than the kernel's buffers take.
        for _ in range(200_000):
            session.press(7)
            if session.link is None:
                break
        await until(lambda: session.link is None)
        again = await Peer.connect(path)
        assert (await again.hello(token=peer.token, resume=True)).status.code == pb.OK
        assert not (await again.lease()).status.code

    with_server(scenario, tmp_path)


def test_pressure_waits_for_a_disconnected_session(tmp_path):
    async def scenario(runtime, path):
        peer = await Peer.connect(path)
        await peer.hello()
        (session,) = runtime.sessions
        peer.close()
        await until(lambda: session.link is None)
        session.press(5)
        again = await Peer.connect(path)
        await again.hello(token=peer.token, resume=True)
        assert (await again.receive()).pressure.num_blocks == 5

    with_server(scenario, tmp_path)


def test_bytes_may_come_one_by_one(tmp_path):
    async def scenario(runtime, path):
        peer = await Peer.connect(path)
        frame = encode(pb.ClientMessage(hello=pb.Hello(
            session_token=peer.token, protocol_version=1, model_fingerprint="m", kv_spec=SPEC,
        )))  # fmt: skip
        for byte in frame:
            peer.writer.write(bytes([byte]))
            await peer.writer.drain()
            await asyncio.sleep(0)
        assert (await peer.receive()).hello.session_id

    with_server(scenario, tmp_path)


def test_a_killed_server_process_is_not_an_option(tmp_path):
    """KillSession refuses the process it runs in, and one it has no handle of."""

    async def scenario(runtime, path):
        peer = await Peer.connect(path)
        session_id = (await peer.hello()).session_id
        with pytest.raises(Exception, match="is the server itself"):
            await runtime.lifecycle.kill(session_id)
        with pytest.raises(Exception, match="no session 99"):
            await runtime.lifecycle.kill(99)

    with_server(scenario, tmp_path)


def test_running_out_of_descriptors_does_not_stop_the_server(tmp_path, monkeypatch, caplog):
    """No descriptors left: the connection is refused, the others go on."""

    async def scenario(runtime, path):
        peer = await Peer.connect(path)
        await peer.hello()

        def no_descriptors(connection):
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(attach, "peer_of", no_descriptors)
        for _ in range(3):
            refused = await Peer.connect(path)
            assert refused.first.ended.status.code == pb.EXHAUSTED
        (line,) = [record for record in caplog.records if "descriptors" in record.message]
        assert "out of descriptors" in line.message, "told once"
        assert not (await peer.lease()).status.code

    with_server(scenario, tmp_path)


def test_before_hello_little_is_kept_and_a_large_step_may_come_right_behind_it(tmp_path):
    async def scenario(runtime, path):
        stranger = await Peer.connect(path)
        stranger.writer.write((limits.MAX_HELLO_BYTES + 1).to_bytes(4, "little"))
        assert "at most 65536" in (await stranger.receive()).ended.status.message
        peer = await Peer.connect(path)
        hello = pb.Hello(session_token=peer.token, protocol_version=1,
                         model_fingerprint="model", kv_spec=SPEC)  # fmt: skip
        step = pb.Step(number=1, ops=[acquire(1, range(100_000))])
        peer.writer.write(
            encode(pb.ClientMessage(hello=hello)) + encode(pb.ClientMessage(step=step))
        )
        assert not (await peer.receive()).hello.status.code
        assert (await peer.lease_after_pools(sent=True)).status.code == pb.TOO_LARGE

    with_server(scenario, tmp_path)


def test_pools_that_nobody_reads_wait_without_harm(tmp_path):
    async def scenario(runtime, path):
        peer = await Peer.connect(path)
        await peer.hello()
        (session,) = runtime.sessions
        peer.writer.transport.pause_reading()
        (connection,) = session.connections
        for _ in range(2000):
            connection.send_pools()
        other = await Peer.connect(path)
        await other.hello()
        assert not (await other.lease()).status.code
        peer.writer.transport.resume_reading()
        assert not (await peer.lease_after_pools()).status.code

    with_server(scenario, tmp_path)


def test_a_broken_invariant_stops_the_server_loudly(tmp_path, monkeypatch, caplog):
    class Stopped(BaseException):
        pass

    def stop(code):
        assert code == 70
        raise Stopped

    async def scenario(runtime, path):
        monkeypatch.setattr("radixkv.server.runtime.os._exit", stop)
        with monkeypatch.context() as broken, pytest.raises(Stopped):
            broken.setattr(runtime.cache, "check", lambda: (_ for _ in ()).throw(AssertionError))
            runtime.settle()
        assert "an invariant of the cache does not hold" in caplog.text

    with_server(scenario, tmp_path)


def test_the_descriptor_is_the_pool(tmp_path):
    async def scenario(runtime, path):
        loop = asyncio.get_running_loop()
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(str(path))
        data = await loop.run_in_executor(None, raw.recv, 1 << 16)
        attached = pb.ServerMessage.FromString(FrameDecoder().feed(data)[0]).attached
        raw.sendall(encode(pb.ClientMessage(hello=pb.Hello(
            session_token=attached.session_token, protocol_version=1, model_fingerprint="m",
            kv_spec=SPEC,
        ))))  # fmt: skip
        decoder, frames, found = FrameDecoder(), [], []
        while len(frames) < 2:
            data, descriptors, _, _ = await loop.run_in_executor(
                None, socket.recv_fds, raw, 1 << 16, 4
            )
            found += descriptors
            frames += decoder.feed(data)
        (pool,) = pb.ServerMessage.FromString(frames[1]).pools.pools
        view = runtime.pool_host.arena.view()
        view[3] = 77
        with open(found[0], "rb") as file:
            content = file.read()
        assert len(content) == pool.size_bytes == (NUM_BLOCKS + 1) * SPEC.block_bytes
        assert content[3 * SPEC.block_bytes : 4 * SPEC.block_bytes] == bytes([77]) * 8
        raw.close()

    with_server(scenario, tmp_path)
