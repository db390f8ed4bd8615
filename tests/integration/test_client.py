"""The shipped client against a real server: every operation, sync and asyncio, both transports."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import numpy
import pytest

from radixkv_client import (
    Cancelled,
    Client,
    DeadlineExceeded,
    Exhausted,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Scope,
    TooLarge,
)
from tests.client_rig import FORMS, SPEC, B, check_idle, check_kv, connected, kv_view, write_kv
from tests.server_process import ServerProcess

_starts = count(0, 100_000)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--check-invariants", "--block-size", str(B), gpu_blocks=64) as process:
        yield process


@pytest.fixture(params=FORMS, ids="-".join)
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Any]:
    with connected(request.param, server.socket_dir) as made:
        made.tools.invalidate(everything=True)
        yield made
        check_idle(made)


@pytest.fixture
def prompt() -> list[int]:
    """Ten tokens that no other test uses."""
    start = next(_starts)
    return list(range(start, start + 10))


def test_hello_tells_limits_and_geometry(client: Any, server: ServerProcess):
    assert client.block_size == B and client.hello.num_blocks == 64
    assert client.hello.limits.max_unacknowledged_steps == 8
    assert len(client.incarnation) == 16 and client.session_id > 0
    assert client.pool.as_numpy().shape == (65, SPEC.block_bytes)
    assert client.session_id in [session.session_id for session in client.sessions()]


def test_a_prefix_is_computed_once_and_its_bytes_are_found_again(client: Any, prompt: list[int]):
    with client.acquire(prompt) as lease:
        assert (lease.cached_tokens, len(lease.block_table)) == (0, 3)
        write_kv(client, lease, prompt, 0)
        assert lease.commit(len(prompt)).published_tokens == 8
        first = lease.block_table.tolist()
    with client.acquire(prompt) as lease:
        assert lease.cached_tokens == 8 and lease.block_table.tolist()[:2] == first[:2]
        check_kv(client, lease, prompt, 8)
    assert client.lookup(prompt).cached_tokens == 8
    assert client.lookup([*prompt[:4], 9, 9, 9, 9, 9]).miss.kind == "DIVERGES"


def test_decode_draws_from_the_reserve_without_a_round_trip_each(client: Any, prompt: list[int]):
    with client.acquire(prompt) as lease:
        write_kv(client, lease, prompt, 0)
        lease.commit(len(prompt))
        tokens, known = list(prompt), len(prompt)
        for token in range(20):
            if len(tokens) == len(lease.block_table) * B:
                lease.append_blocks(1)
            tokens.append(token)
            write_kv(client, lease, tokens, len(tokens) - 1)
            if len(tokens) % B == 0:
                lease.commit(len(tokens), tokens[known:])
                known = len(tokens)
        assert lease.committed_tokens == 28 and lease.num_tokens == 28
    with client.acquire([*tokens, 1]) as lease:
        assert lease.cached_tokens == 28
        check_kv(client, lease, tokens, 28)


def test_extend_after_drawing_keeps_the_tables_in_step(client: Any, prompt: list[int]):
    with client.acquire(prompt) as lease:
        lease.append_blocks(1)
        blocks = lease.extend(2)
        assert len(lease.block_table) == 6 and lease.block_table.tolist()[-2:] == blocks
        tokens = prompt + list(range(14))
        write_kv(client, lease, tokens, 0)
        lease.commit(24, tokens[10:])
        table = lease.block_table.tolist()
    with client.acquire([*tokens, 1]) as lease:
        assert lease.block_table.tolist()[:6] == table
        check_kv(client, lease, tokens, 24)


def test_trim_forgets_tokens_and_keeps_blocks_for_later(client: Any, prompt: list[int]):
    with client.acquire(prompt) as lease:
        lease.commit(4)
        lease.append_blocks(1)
        lease.trim(6)
        assert len(lease.block_table) == 2 and lease.num_tokens == 6
        with pytest.raises(FailedPrecondition, match="committed"):
            lease.trim(3)
        other = [*prompt[:6], 77, 78, 79]
        lease.append_blocks(1)
        write_kv(client, lease, other, 0)
        lease.commit(9, other[6:])
    assert client.lookup(other).cached_tokens == 8
    assert client.lookup(prompt).cached_tokens == 4


def test_forks_share_full_blocks_and_own_their_tails(client: Any, prompt: list[int]):
    with client.acquire(prompt) as lease:
        write_kv(client, lease, prompt, 0)
        lease.commit(10)
        children = lease.fork(2, 10)
        tables = [child.block_table.tolist() for child in children]
        assert all(table[:2] == lease.block_table.tolist()[:2] for table in tables)
        assert len({table[2] for table in tables} | {lease.block_table[2]}) == 3
        for number, child in enumerate(children):
            with child:
                check_kv(client, child, prompt, 10)
                branch = [*prompt, number, number]
                write_kv(client, child, branch, 10)
                assert child.commit(12, branch[10:]).published_tokens == 12
        check_kv(client, lease, prompt, 10)
    for number in range(2):
        assert client.lookup([*prompt, number, number, 0]).cached_tokens == 12


def test_a_drawn_tail_can_be_forked_and_stays_the_parents(client: Any, prompt: list[int]):
    tokens = prompt[:8]
    with client.acquire(tokens) as lease:
        lease.commit(8)
        (block,) = lease.append_blocks(1)
        tokens = [*tokens, 5, 6]
        write_kv(client, lease, tokens, 0)
        (child,) = lease.fork(1, 10)
        with child:
            check_kv(client, child, tokens, 10)
            assert child.num_tokens == 8
        lease.commit(10, tokens[8:])
        assert lease.block_table.tolist()[2] == block
        check_kv(client, lease, tokens, 10)


def test_a_partial_tail_is_copied_on_request(client: Any, prompt: list[int]):
    with client.acquire(prompt + [1, 2]) as lease:
        write_kv(client, lease, prompt + [1, 2], 0)
        lease.commit(12)
    with client.acquire([*prompt, 9], partial_tail=True) as lease:
        assert lease.cached_tokens == 10 and lease.committed_tokens == 8
        check_kv(client, lease, prompt, 10)


def test_scopes_keep_tenants_apart(client: Any, prompt: list[int]):
    scope = Scope(salt="a")
    with client.acquire(prompt, scope=scope) as lease:
        lease.commit(10)
    assert client.lookup(prompt, scope).cached_tokens == 8
    assert client.lookup(prompt).cached_tokens == 0
    with pytest.raises(InvalidArgument, match="version"):
        client.acquire(prompt, scope=Scope(adapter="x"))


def test_leaving_the_context_releases_also_by_an_exception(client: Any, prompt: list[int]):
    with pytest.raises(KeyError), client.acquire(prompt):
        raise KeyError
    check_idle(client)
    lease = client.acquire(prompt)
    assert lease.release("conversation over", (8, b"")) == 8
    with pytest.raises(FailedPrecondition, match="released"):
        lease.commit(8)
    with lease:
        pass
    with pytest.raises(InvalidArgument, match="reason"), client.acquire(prompt) as lease:
        lease.release("bored")


def test_a_batch_is_one_step_and_may_use_leases_it_creates(client: Any, prompt: list[int]):
    before = client.stats().counters
    with client.batch() as batch:
        acquiring = batch.acquire(prompt)
        committing = batch.commit(acquiring.lease, 8)
        forking = batch.fork(acquiring.lease, 1, 8)
        releasing = batch.release(acquiring.lease)
        (child,) = forking.children
        batch.release(child)
    assert acquiring.result().block_table and committing.result().published_tokens == 8
    assert releasing.result() == 8 and forking.result() is not None
    after = client.stats().counters
    assert (after.acquires - before.acquires, after.forks - before.forks) == (1, 1)


def test_a_batch_left_by_an_exception_leaves_no_lease(client: Any, prompt: list[int]):
    with pytest.raises(KeyError), client.batch() as batch:
        pending = batch.acquire(prompt)
        raise KeyError
    pending.result()
    time.sleep(0.05)
    check_idle(client)


def test_an_operation_behind_a_failed_acquire_fails_with_its_status(client: Any):
    with client.batch() as batch:
        acquiring = batch.acquire(list(range(1000)))
        committing = batch.commit(acquiring.lease, 4)
    with pytest.raises(TooLarge):
        acquiring.result()
    with pytest.raises((NotFound, TooLarge)):
        committing.result()
    with pytest.raises(TooLarge):
        acquiring.lease.commit(4)


def test_exhausted_is_retryable_and_has_numbers(client: Any, prompt: list[int]):
    with client.acquire(prompt, extra_blocks=50) as lease:
        with pytest.raises(Exhausted, match=r"\d") as caught:
            client.acquire([*prompt[::-1]], extra_blocks=50)
        assert caught.value.retryable
        with pytest.raises(Exhausted):
            lease.extend(20)
        with pytest.raises(Exhausted, match="reserve"):
            lease.append_blocks(60)


def test_waiting_for_anothers_computation_ends_with_its_commit(client: Any, prompt: list[int]):
    with client.acquire(prompt) as lease:
        pending = client.acquire_nowait(prompt, wait_ms=20_000)
        second = client.acquire(prompt)
        assert second.being_computed == 8 and not pending.done()
        second.release()
        write_kv(client, lease, prompt, 0)
        lease.commit(10)
        with pending.result() as waited:
            assert waited.cached_tokens == 8
            check_kv(client, waited, prompt, 8)


def test_more_acquires_may_wait_than_steps_may_be_unacknowledged(client: Any, prompt: list[int]):
    with client.acquire(prompt) as lease:
        pending = [client.acquire_nowait(prompt, wait_ms=20_000) for _ in range(20)]
        wait_until(client, lambda: client.stats().num_waiting == 20)
        lease.commit(10)
        for waiting in pending:
            waiting.result().release()


def test_an_acquire_that_times_out_here_leaves_nothing(client: Any, prompt: list[int]):
    with client.acquire(prompt, extra_blocks=55):
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.acquire(prompt[::-1], extra_blocks=10, capacity_wait_ms=600, timeout=-0.5)
        assert time.monotonic() - started < 1
        pending = client.acquire_nowait(prompt[::-1], extra_blocks=10, capacity_wait_ms=9000)
        pending.cancel()
        with pytest.raises(Cancelled):
            pending.result()
        client.acquire(prompt).release()
        assert client.stats().num_waiting == 0


def test_d2_expired_acquires_leak_nothing(client: Any, prompt: list[int]):
    for _ in range(100):
        with suppress(DeadlineExceeded):
            client.acquire(prompt, timeout=0.0).release()
    client.acquire(prompt).release()


def test_preemptions_and_resumed_acquires_are_counted_apart(client: Any, prompt: list[int]):
    before = client.stats().counters
    with client.acquire(prompt) as lease:
        lease.commit(8)
        lease.release("preempted")
    client.acquire(prompt, resumed=True).release()
    after = client.stats().counters
    assert after.preemptions - before.preemptions == 1
    assert after.resumed_acquires - before.resumed_acquires == 1
    assert after.queried_tokens - before.queried_tokens == 10
    assert after.resumed_hit_tokens - before.resumed_hit_tokens == 8


def test_pressure_takes_the_reserve_first_and_reports_the_rest(
    client: Any, prompt: list[int], server: ServerProcess
):
    lease = client.acquire(prompt, extra_blocks=48)
    lease.append_blocks(1)
    with connected(("sync", "local"), server.socket_dir) as other:
        pending = other.acquire_nowait(prompt[::-1], extra_blocks=20, capacity_wait_ms=20_000)
        wanted: list[int] = []
        wait_until(client, lambda: wanted.append(client.pressure) or wanted[-1])
        assert 0 < wanted[-1] < 23
        wait_until(client, lambda: client.stats().books.reserved == 1)
        lease.release("preempted")
        pending.result().release()


def wait_until(client: Any, condition: Callable[[], Any], timeout_s: float = 10) -> None:
    """Poll until the condition holds; the asyncio client needs no polling."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        if isinstance(client, Client):
            client.poll(0.01)


def test_an_event_holds_the_message_back(client: Any, prompt: list[int]):
    class Event:
        synchronized = 0

        def synchronize(self) -> None:
            type(self).synchronized += 1

    with client.acquire(prompt) as lease:
        lease.commit(8, event=Event())
        lease.fork(1, 8, event=Event())[0].release(event=Event())
        with client.batch() as batch:
            batch.commit(lease, 8, event=Event())
        assert Event.synchronized == 4
        with pytest.raises(ZeroDivisionError):
            lease.commit(9, event=lambda: 1 // 0)
        assert lease.commit(8).published_tokens == 8


def test_a_wrong_argument_hurts_only_its_call(client: Any, prompt: list[int]):
    with client.acquire(prompt) as lease:
        for call in (
            lambda: client.acquire([-1]),
            lambda: client.acquire(b"\xff\xff\xff\xff"),
            lambda: client.acquire([]),
            lambda: lease.commit(11),
            lambda: lease.extend(0),
            lambda: lease.fork(0, 0),
            *(
                lambda call=call, bad=bad: call(bad)
                for bad in (-1, 1.5, True, "1", None, 2**31)
                for call in (
                    lease.extend,
                    lease.append_blocks,
                    lease.trim,
                    lease.commit,
                    lambda number: lease.fork(number, 0),
                    lambda upto: lease.fork(1, upto),
                    lambda upto: lease.release(commit=(upto, b"")),
                    lambda number: client.acquire(prompt, extra_blocks=number),
                    lambda number: client.acquire(prompt, wait_ms=number),
                )
            ),
            lambda: lease.append_blocks(0),
            lambda: lease.fork(10**9, 0),
            lambda: client.acquire(prompt, resumed=1),
        ):
            with pytest.raises(InvalidArgument):
                call()
        with pytest.raises(TypeError):
            client.acquire(prompt, unknown=1)
        with pytest.raises(FailedPrecondition):
            lease.fork(1, 10)
        lease.commit(8)
        assert lease.fork(1, 8)[0].release() == 8


def test_layers_are_views_of_the_mapping(client: Any, prompt: list[int]):
    torch = pytest.importorskip("torch")
    with client.acquire(prompt) as lease:
        write_kv(client, lease, prompt, 0)
        for layer in range(SPEC.num_layers):
            keys, values = client.pool.torch_view(layer)
            assert keys.shape == values.shape == (65, 2, B, 4) and keys.dtype == torch.int8
            view = kv_view(client).view(numpy.int8)
            assert (keys.numpy() == view[:, layer, 0]).all()
            assert (values.numpy() == view[:, layer, 1]).all()
        keys[lease.block_table[0], 1, 2, 3] = 42
        assert kv_view(client)[lease.block_table[0], 1, 0, 1, 2, 3] == 42
        with pytest.raises(InvalidArgument, match="layer 2"):
            client.pool.torch_view(2)
