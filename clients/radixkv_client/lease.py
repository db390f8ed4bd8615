"""A lease as the client sees it: builds its operations and takes in their replies.

Theory of operation
    Knows: the block table, which of its blocks the server knows (`named`, a prefix of the table;
    the drawn rest counts as the session's reserve until a Commit names it), how many tokens the
    server knows, how many are committed.
    Must not know: sockets, threads. The client calls under its lock; both twins, sync and asyncio,
    and batches use these builders.

    WAITING --Acquire or Fork answered OK--> LIVE --Release submitted--> ENDED
    WAITING --answered with an error, or Release submitted--> ENDED
    Any state: when its session has failed, every operation raises the session's failure.

    Building an operation changes what the client believes (tokens known, blocks named), since more
    operations may follow before the answer. If one is refused and nothing followed, the belief is
    put back. If something did, the two sides may differ, so the lease can only be released.
    Tokens are sent without their position, so a Commit with tokens is not built while an earlier
    one is unanswered: if that were refused, these would land in the wrong place.
    Invariants: named <= len(block_table); drawn blocks are the table's end; an Extend is never
    built over drawn blocks (they are named first), nor a block drawn while an Extend is unanswered.
"""

from array import array
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from radixkv.v1 import session_pb2 as pb
from radixkv_client.connected import Connected
from radixkv_client.errors import FailedPrecondition, InvalidArgument, RadixKVError, fresh
from radixkv_client.protocol import Request
from radixkv_client.tokens import TOKEN_BYTES, block_ids
from radixkv_client.values import (
    PLAIN,
    AcquireOptions,
    Committed,
    ContentRange,
    Miss,
    Onboarding,
    contents_to_proto,
    reason_to_proto,
    whole_number,
)

Undo = Callable[[RadixKVError], None]


class _Phase(Enum):
    WAITING = "waiting for its Acquire or Fork"
    LIVE = "live"
    ENDED = "released"


class LeaseState:
    """One sequence's lease; the twins add the methods that send.

    `block_table` holds block ids in order and belongs to the caller to read. `cached_tokens` is how
    many tokens' KV was there at Acquire (or Fork); `being_computed` how many behind them another
    lease was computing; `onboarding` what was done about those below the gpu, None if none were.
    `num_tokens` is how many tokens the server knows: tokens given to commit go on from there.
    `committed_tokens` is a multiple of the block size.
    """

    cached_tokens = 0
    being_computed = 0
    waited_ms = 0
    onboarding: Onboarding | None = None
    committed_tokens = 0
    _miss: tuple[int, int, bytes] = (0, 0, b"")  # fields of MissReason
    _phase = _Phase.WAITING
    _failure: RadixKVError | None = None
    _named = 0
    _upto = 0  # of the latest Commit built
    _version = 0  # of what the client believes: one more for each operation built
    _num_extends = 0  # unanswered
    _tokens_under_way = False
    _stranded = array("i")  # drawn blocks of a refused Commit that more was built on

    def __init__(self, client: Any, connected: Connected, num_tokens: int) -> None:
        self.id = connected.next_lease_id()
        self.block_table = array("i")
        self.num_tokens = num_tokens
        self.connected = connected
        self._client = client

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.id} {self._phase.name}: {self.num_tokens} tokens, "
            f"{self.committed_tokens} committed, {len(self.block_table)} blocks>"
        )

    @property
    def live(self) -> bool:
        """True from the answer of its Acquire or Fork to its Release or the session's end."""
        return self._phase is _Phase.LIVE and self.connected.session.failure is None

    @property
    def miss(self) -> Miss:
        """Why no more was cached at Acquire."""
        kind, at_token, nearest_tokens = self._miss
        return Miss(pb.MissReason.Kind.Name(kind), at_token, block_ids(nearest_tokens))

    @property
    def ended(self) -> bool:
        """True once released, or refused; a lease that a restart took is not ended but lost."""
        return self._phase is _Phase.ENDED

    # ---- builders ---------------------------------------------------------------------------

    def acquire_request(self, tokens: bytes, options: AcquireOptions = PLAIN) -> Request:
        """Take this lease on the prompt `tokens` (int32 bytes)."""
        op = pb.Op()
        acquire = op.acquire
        acquire.lease_id = self.id
        acquire.tokens = tokens
        if options is not PLAIN:
            acquire.extra_blocks = options.extra_blocks
            acquire.partial_tail = options.partial_tail
            acquire.capacity_wait_ms = options.capacity_wait_ms
            acquire.wait_ms = options.wait_ms
            acquire.resumed = options.resumed
            if options.scope is not None:
                acquire.scope.CopyFrom(options.scope.to_proto())
            acquire.contents.extend(contents_to_proto(options.contents))
            acquire.tags.extend(options.tags)
            if options.retention is not None:
                acquire.retention.CopyFrom(options.retention.to_proto())
        return Request(op, self._acquired, self._end)

    def extend_requests(self, num_blocks: int) -> list[Request]:
        """Add private blocks; names drawn blocks first, so that the table's order holds."""
        self._check_usable()
        op = pb.Op()
        op.extend.lease_id = self.id
        op.extend.num_blocks = whole_number("num_blocks", num_blocks, 1)
        requests = [self._naming_request()] if self._num_drawn else []
        self._num_extends += 1
        return [*requests, Request(op, self._extended, self._extend_refused)]

    def trim_requests(self, upto: int) -> list[Request]:
        """Forget uncommitted tokens from `upto` on; none if the server need not hear of it."""
        self._check_usable()
        upto = whole_number("upto", upto)
        if not self.committed_tokens <= upto:
            raise FailedPrecondition(
                f"trim to {upto} tokens: {self.committed_tokens} are committed"
            )
        keep = -(-upto // self.connected.block_size)
        if self._phase is _Phase.LIVE:
            self._put_back_drawn(max(keep, self._named))
            server_agrees = upto >= self.num_tokens and keep >= self._named
            if server_agrees and not self._num_extends:
                return []
        op = pb.Op()
        op.trim.lease_id = self.id
        op.trim.upto = upto
        undo = self._believing()
        self.num_tokens = min(self.num_tokens, upto)
        self._upto = min(self._upto, upto)
        return [Request(op, lambda reply: self._trimmed(reply, keep), undo)]

    def new_children(self, num_children: int) -> list[Any]:
        """Leases for a Fork of this one to fill."""
        self.connected.check()
        count = whole_number("num_children", num_children, 1)
        most = self.connected.session.limits.max_leases
        if count > most:
            raise InvalidArgument(f"num_children {count}: a session has at most {most} leases")
        return [type(self)(self._client, self.connected, 0) for _ in range(count)]

    def fork_request(self, children: Sequence["LeaseState"], upto: int) -> Request:
        """Branch at `upto` tokens, whose full blocks are committed; children are new leases."""
        self._check_usable()
        upto = whole_number("upto", upto)
        num_full, rest = divmod(upto, self.connected.block_size)
        if rest and self._phase is _Phase.WAITING:
            raise FailedPrecondition(
                "fork inside a block: its id is known once Acquire is answered"
            )
        if rest and num_full >= len(self.block_table):
            raise InvalidArgument(
                f"fork at {upto} tokens: the table has {len(self.block_table)} blocks"
            )
        op = pb.Op()
        op.fork.lease_id = self.id
        op.fork.child_ids.extend(child.id for child in children)
        op.fork.upto = upto
        op.fork.tail_block = self.block_table[num_full] if rest else 0

        for child in children:
            child.num_tokens = min(self.num_tokens, upto)

        def refused(error: RadixKVError) -> None:
            for child in children:
                child._end(error)

        return Request(op, lambda reply: self._forked(reply, children, upto), refused)

    def commit_request(
        self, upto: int, tokens: bytes, contents: Sequence[ContentRange] = ()
    ) -> Request:
        """Publish the full blocks of the first `upto` tokens; `tokens` go on at `num_tokens`."""
        self._check_usable()
        op = pb.Op()
        undo = self._fill_commit(op.commit, upto, tokens, contents)
        return Request(op, lambda reply: self._committed(reply, upto, bool(tokens)), undo)

    def release_request(self, reason: str, commit: tuple[int, bytes] | None = None) -> Request:
        """Give the lease back, or cancel its Acquire; drawn blocks stay in the reserve."""
        self._check_not_ended()
        op = pb.Op()
        release = op.release
        release.lease_id = self.id
        release.reason = reason_to_proto(reason)
        undo: Undo | None = None
        if commit is not None:
            self._check_usable()
            undo = self._fill_commit(release.commit, commit[0], commit[1], ())
        self._put_back_drawn(self._named)
        if self._stranded:
            self.connected.reserve.put_back(self._stranded)
            self._stranded = array("i")
        before, self._phase = self._phase, _Phase.ENDED

        def refused(error: RadixKVError) -> None:
            if undo is not None:
                undo(error)
                self._put_back_drawn(self._named)
            self._phase = before

        return Request(op, _released, refused)

    def draw(self, num_blocks: int) -> array:
        """Append blocks of the reserve, which has them, to the table."""
        self.check_drawable()
        drawn = self.connected.reserve.draw(num_blocks)
        self.block_table.extend(drawn)
        return drawn

    def check_drawable(self) -> None:
        """Raise unless blocks may be drawn for this lease now."""
        self._check_usable()
        if self._phase is _Phase.WAITING or self._num_extends:
            raise FailedPrecondition("an Acquire, Fork or Extend of this lease is unanswered")

    # ---- replies ----------------------------------------------------------------------------

    def _acquired(self, reply: pb.Reply) -> "LeaseState":
        result = reply.acquire
        self.block_table.frombytes(result.block_table)
        self.cached_tokens = cached_tokens = result.cached_tokens
        self.being_computed = result.being_computed
        self.waited_ms = result.waited_ms
        if result.HasField("miss"):
            miss = result.miss
            self._miss = (miss.kind, miss.at_token, miss.nearest_tokens)
        if result.HasField("onboarding"):
            self.onboarding = Onboarding.from_proto(result.onboarding)
        self._go_live(cached_tokens)
        return self

    def _go_live(self, num_tokens: int) -> None:
        block_size = self.connected.block_size
        self.committed_tokens = num_tokens // block_size * block_size
        self._named = len(self.block_table)
        if self._phase is _Phase.WAITING:
            self._phase = _Phase.LIVE

    def _extended(self, reply: pb.Reply) -> array:
        blocks = block_ids(reply.extend.blocks)
        self._num_extends -= 1
        self.block_table.extend(blocks)
        self._named += len(blocks)
        return blocks

    def _extend_refused(self, error: RadixKVError) -> None:
        self._num_extends -= 1

    def _trimmed(self, reply: pb.Reply, keep: int) -> None:
        if keep < self._named:
            self._put_back_drawn(self._named)
            del self.block_table[keep:]
            self._named = keep
        self.connected.reserve.add(block_ids(reply.trim.to_reserve))

    def _forked(
        self, reply: pb.Reply, children: Sequence["LeaseState"], upto: int
    ) -> Sequence["LeaseState"]:
        tails = block_ids(reply.fork.tail_blocks)
        shared = self.block_table[: upto // self.connected.block_size]
        for position, child in enumerate(children):
            child.block_table.extend(shared)
            child.block_table.extend(tails[position : position + 1])
            child.cached_tokens = upto
            child._go_live(upto)
        return children

    def _committed(self, reply: pb.Reply, upto: int, had_tokens: bool) -> Committed:
        block_size = self.connected.block_size
        self.committed_tokens = max(self.committed_tokens, upto // block_size * block_size)
        if had_tokens:
            self._tokens_under_way = False
        return Committed(reply.commit.published_tokens, reply.commit.duplicate_blocks)

    def _end(self, error: RadixKVError) -> None:
        self._phase = _Phase.ENDED
        self._failure = error

    # ---- helpers ----------------------------------------------------------------------------

    @property
    def _num_drawn(self) -> int:
        return len(self.block_table) - self._named

    def _fill_commit(
        self, commit: pb.Commit, upto: int, tokens: bytes, contents: Sequence[ContentRange]
    ) -> Undo:
        """Fill in a Commit that names all drawn blocks; returns what undoes it."""
        upto = whole_number("upto", upto)
        num_known = self.num_tokens + len(tokens) // TOKEN_BYTES
        if tokens and self._tokens_under_way:
            raise FailedPrecondition("an earlier commit with tokens of this lease is unanswered")
        if upto > num_known:
            raise InvalidArgument(
                f"commit up to {upto} tokens: {self.num_tokens} are known and "
                f"{num_known - self.num_tokens} given"
            )
        drawn = self.block_table[self._named :]
        commit.lease_id = self.id
        commit.upto = upto
        commit.tokens = tokens
        commit.blocks = drawn.tobytes()
        commit.contents.extend(contents_to_proto(contents))
        undo = self._believing(drawn)
        self._tokens_under_way = self._tokens_under_way or bool(tokens)
        self.num_tokens = num_known
        self._upto = max(self._upto, upto)
        self._named += len(drawn)
        self.connected.reserve.named(len(drawn))
        return undo

    def _naming_request(self) -> Request:
        op = pb.Op()
        upto = max(self._upto, self.committed_tokens)
        undo = self._fill_commit(op.commit, upto, b"", ())
        return Request(op, lambda reply: self._committed(reply, upto, False), undo)

    def _believing(self, drawn: array | None = None) -> Undo:
        """What a refusal does: put back the belief of now, unless more was built on it.

        `drawn` are blocks that the operation names; the server still counts them as reserved.
        """
        self._version += 1
        version, named, num_tokens = self._version, self._named, self.num_tokens

        def refused(error: RadixKVError) -> None:
            self._tokens_under_way = False
            self.connected.reserve.refused(len(drawn or ()))
            if self._version == version:
                self._named, self.num_tokens = named, num_tokens
                return
            self._stranded = self._stranded + (drawn or array("i"))
            if self._failure is None:
                self._failure = FailedPrecondition(
                    f"lease {self.id}: an operation was refused ({error}) while later ones were "
                    "under way; release the lease"
                )

        return refused

    def _put_back_drawn(self, keep: int) -> None:
        """Drawn blocks at and behind table position `keep` go back to the reserve."""
        if keep < len(self.block_table):
            self.connected.reserve.put_back(self.block_table[keep:])
            del self.block_table[keep:]

    def _check_usable(self) -> None:
        self._check_not_ended()
        if self._failure is not None:
            raise fresh(self._failure)

    def _check_not_ended(self) -> None:
        self.connected.check()
        if self._phase is _Phase.ENDED:
            ended = FailedPrecondition(f"lease {self.id} is released")
            raise ended if self._failure is None else fresh(self._failure)


def _released(reply: pb.Reply) -> int:
    cached_tokens: int = reply.release.cached_tokens
    return cached_tokens
