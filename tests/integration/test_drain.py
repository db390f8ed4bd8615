"""SIGTERM: no new leases, running ones go on, then the server ends; the second one ends at once."""

import signal
import time
import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from radixkv.v1 import session_pb2 as pb
from tests.raw_session import RawSession, tokens
from tests.server_process import ServerProcess

EXIT_LEASES_LOST = 3


def take_lease(session: RawSession, lease_id: int = 1) -> pb.Reply:
    """Acquire a lease on 40 tokens."""
    return session.call(acquire=pb.Acquire(lease_id=lease_id, tokens=tokens(range(40))))


def readiness(server: ServerProcess) -> int:
    """Status code of /readyz."""
    try:
        with urllib.request.urlopen(server.http_url + "/readyz", timeout=5) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def wait_until_draining(server: ServerProcess) -> None:
    """Bounded wait for /readyz to say so."""
    deadline = time.monotonic() + 5
    while readiness(server) != 503:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_drain_waits_for_the_last_lease() -> None:
    with ServerProcess() as server, RawSession(server) as session:
        session.greet()
        assert take_lease(session).status.code == pb.OK
        server.signal(signal.SIGTERM)
        wait_until_draining(server)
        assert take_lease(session, lease_id=2).status.code == pb.UNAVAILABLE
        extended = session.call(extend=pb.Extend(lease_id=1, num_blocks=1))
        assert extended.status.code == pb.OK
        committed = session.call(commit=pb.Commit(lease_id=1, upto=32))
        assert committed.commit.published_tokens == 32
        with grpc.insecure_channel(server.grpc_target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for service in ("", "radixkv.v1.Cache"):
                request = health_pb2.HealthCheckRequest(service=service)
                reply = stub.Check(request, timeout=5)
                assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
        with RawSession(server) as late:
            assert late.greet().status.code == pb.UNAVAILABLE
        start = time.monotonic()
        assert session.call(release=pb.Release(lease_id=1)).status.code == pb.OK
        assert server.wait() == 0
        assert time.monotonic() - start < 5


def test_drain_timeout_ends_the_wait_and_the_exit_code_says_so() -> None:
    with (
        ServerProcess("--drain-timeout", "0.3") as server,
        RawSession(server) as session,
    ):
        session.greet()
        take_lease(session)
        start = time.monotonic()
        assert server.stop() == EXIT_LEASES_LOST
        assert 0.3 <= time.monotonic() - start < 5
        assert session.ended().code == pb.UNAVAILABLE


def test_second_signal_ends_at_once() -> None:
    with ServerProcess() as server, RawSession(server) as session:
        session.greet()
        take_lease(session)
        server.signal(signal.SIGTERM)
        wait_until_draining(server)
        server.signal(signal.SIGINT)
        assert server.wait(5) == EXIT_LEASES_LOST


def test_drain_with_a_worker_that_neither_reads_nor_answers() -> None:
    with ServerProcess() as server, RawSession(server) as session:
        session.greet()
        assert server.stop(10) == 0
