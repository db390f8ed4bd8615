"""One session's operations: wire message -> core call -> wire reply.

Tokens, ranges and lease ids are checked by the core; what only the wire can get wrong is checked
here. Nothing here waits or does I/O.
"""

from array import array
from collections.abc import Callable, Iterable
from typing import Any

from radixkv.core.cache import Cache
from radixkv.core.errors import Exhausted, InvalidArgument
from radixkv.core.results import (
    Acquired,
    AcquireRequest,
    Committed,
    ContentRange,
    Forked,
    Miss,
    Onboarded,
    ReleaseReason,
    Retention,
    Waiting,
)
from radixkv.server.backing import Backing
from radixkv.server.errors import Unavailable
from radixkv.server.namespaces import SessionNamespaces
from radixkv.v1 import session_pb2 as pb
from radixkv.wire import limits

_REASONS = {reason.value: reason for reason in ReleaseReason}
Blocks = tuple[int, ...]


class Operations:
    """What one session can ask of the cache. Methods take the wire's message and mutate the core.

    They raise the core's errors, and then have changed nothing.
    """

    def __init__(
        self,
        cache: Cache,
        session_id: int,
        namespaces: SessionNamespaces,
        backing: Backing,
        now_ms: Callable[[], int],
    ) -> None:
        self._cache = cache
        self._session_id = session_id
        self._namespaces = namespaces
        self._backing = backing
        self._now_ms = now_ms
        self.accepting = True  # False while the server drains: no new leases
        self.run: dict[str, Callable[[Any], Any]] = {
            "acquire": self.acquire,
            "extend": self.extend,
            "trim": self.trim,
            "fork": self.fork,
            "commit": self.commit,
            "release": self.release,
            "refill": self.refill,
            "give_back": self.give_back,
        }

    def acquire(self, body: pb.Acquire) -> Acquired | Waiting:
        """A lease, or Waiting. Raises Unavailable while the server drains."""
        if not self.accepting:
            raise Unavailable("the server is draining and gives no new leases")
        if body.capacity_wait_ms > limits.MAX_WAIT_MS or body.wait_ms > limits.MAX_WAIT_MS:
            raise InvalidArgument(f"an Acquire may wait at most {limits.MAX_WAIT_MS} ms")
        namespaces = self._namespaces
        request = AcquireRequest(
            body.tokens,
            namespaces.of(body.scope) if body.HasField("scope") else namespaces.base,
            contents_of(body.contents) if body.contents else (),
            namespaces.placeholder_tokens,
            body.extra_blocks,
            body.partial_tail,
            body.capacity_wait_ms,
            body.wait_ms,
            body.resumed,
            tags_of(body.tags) if body.tags else (),
            retention_of(body.retention) if body.HasField("retention") else None,
        )
        result = self._cache.acquire(self._session_id, body.lease_id, request, self._now_ms())
        if type(result) is Acquired:
            self.back_acquired(result)
        return result

    def back_acquired(self, result: Acquired) -> None:
        """Memory for a new lease's blocks; without it the lease is undone and Exhausted raised."""
        if self._backing.complete:
            return
        first = result.cached_tokens // self._cache.config.block_size
        blocks = memoryview(result.block_table)[first * limits.TOKEN_BYTES :].cast("i")
        try:
            self._backing.back(max(blocks, default=0))
        except Exhausted:
            self._undo(result, (result.lease_id,))
            raise

    def _undo(self, result: Acquired | Forked, lease_ids: tuple[int, ...]) -> None:
        for copy in result.copies:
            self._cache.copy_done(copy.copy_id, False)
        self.abort(lease_ids)

    def abort(self, lease_ids: tuple[int, ...]) -> None:
        """Take back leases that their worker has not heard of."""
        for lease_id in lease_ids:
            self._cache.release(self._session_id, lease_id, ReleaseReason.ABORTED, self._now_ms())

    def extend(self, body: pb.Extend) -> Blocks:
        """The new private blocks. Memory is made sure of first: Extend cannot be undone."""
        if not self._backing.complete:
            self._cache.check_extend(self._session_id, body.lease_id, body.num_blocks)
            self._backing.prepare(body.num_blocks)
        blocks = self._cache.extend(self._session_id, body.lease_id, body.num_blocks)
        if not self._backing.complete:
            self._backing.back(max(blocks, default=0))
        return blocks

    def trim(self, body: pb.Trim) -> Blocks:
        """Blocks that went to the reserve."""
        return self._cache.trim(self._session_id, body.lease_id, body.upto)

    def fork(self, body: pb.Fork) -> Forked:
        """All children or none."""
        child_ids = tuple(body.child_ids)
        if not 1 <= len(child_ids) <= limits.MAX_CHILDREN_PER_FORK:
            raise InvalidArgument(
                f"a Fork has {len(child_ids)} children, 1 to {limits.MAX_CHILDREN_PER_FORK}"
                " are allowed"
            )
        result = self._cache.fork(
            self._session_id, body.lease_id, child_ids, body.upto, body.tail_block
        )
        if result.tail_blocks and not self._backing.complete:
            try:
                self._backing.back(max(result.tail_blocks))
            except Exhausted:
                self._undo(result, child_ids)
                raise
        return result

    def commit(self, body: pb.Commit) -> Committed:
        """Publish the full blocks below `upto`."""
        return self._cache.commit(
            self._session_id,
            body.lease_id,
            body.upto,
            body.tokens,
            block_ids(body.blocks) if body.blocks else (),
            contents_of(body.contents) if body.contents else (),
            self._now_ms(),
        )

    def release(self, body: pb.Release) -> int:
        """Tokens that stay cached. A Commit it carries goes first; if that fails, so does all."""
        reason = _REASONS.get(body.reason)
        if reason is None:
            raise InvalidArgument(f"release reason {body.reason} is unknown")
        if body.HasField("commit") and not self.is_waiting(body.lease_id):
            if body.commit.lease_id not in (0, body.lease_id):
                raise InvalidArgument(
                    f"the Release of lease {body.lease_id} carries a Commit of lease"
                    f" {body.commit.lease_id}"
                )
            body.commit.lease_id = body.lease_id
            self.commit(body.commit)
        return self._cache.release(self._session_id, body.lease_id, reason, self._now_ms())

    def is_waiting(self, lease_id: int) -> bool:
        """Whether this is an Acquire without an answer."""
        return self._cache.is_waiting(self._session_id, lease_id)

    def refill(self, body: pb.Refill) -> Blocks:
        """Blocks that came into the reserve, at most as many as asked for."""
        blocks = self._cache.refill(self._session_id, min(body.num_blocks, self._num_blocks))
        if blocks and not self._backing.complete:
            try:
                self._backing.back(max(blocks))
            except Exhausted:
                self._cache.give_back(self._session_id, blocks)
                raise
        return blocks

    def give_back(self, body: pb.GiveBack) -> None:
        """Blocks of the reserve go back to the pool."""
        self._cache.give_back(self._session_id, block_ids(body.blocks))

    @property
    def _num_blocks(self) -> int:
        return self._cache.config.num_blocks


def block_ids(data: bytes) -> Blocks:
    """Ids from the wire. Raises InvalidArgument for a wrong length or too many."""
    if len(data) % limits.TOKEN_BYTES:
        raise InvalidArgument(
            f"block ids are {len(data)} bytes, not a multiple of {limits.TOKEN_BYTES}"
        )
    if len(data) > limits.MAX_BLOCKS_PER_OP * limits.TOKEN_BYTES:
        raise InvalidArgument(
            f"{len(data) // limits.TOKEN_BYTES} block ids in one operation, at most"
            f" {limits.MAX_BLOCKS_PER_OP} are allowed"
        )
    return tuple(array("i", data))


def contents_of(contents: Any) -> tuple[ContentRange, ...]:
    """Content ranges from the wire; the core checks each. Raises InvalidArgument for too many."""
    if len(contents) > limits.MAX_CONTENT_RANGES:
        raise InvalidArgument(
            f"{len(contents)} content ranges, at most {limits.MAX_CONTENT_RANGES} are allowed"
        )
    return tuple(ContentRange(item.start, item.length, item.content_id) for item in contents)


def tags_of(tags: Iterable[str]) -> tuple[str, ...]:
    """Tags from the wire, each once. Raises InvalidArgument for too many, or one that is amiss."""
    distinct = tuple(dict.fromkeys(tags))
    if len(distinct) > limits.MAX_TAGS:
        raise InvalidArgument(f"{len(distinct)} tags, at most {limits.MAX_TAGS} are allowed")
    for tag in distinct:
        if not tag.isprintable() or not 1 <= len(tag.encode()) <= limits.MAX_TAG_BYTES:
            raise InvalidArgument(
                f"tag {tag[: limits.MAX_TAG_BYTES]!r} is not 1 to {limits.MAX_TAG_BYTES} bytes of"
                " printable text"
            )
    return distinct


def retention_of(retention: pb.Retention) -> Retention:
    """Retention from the wire; raises InvalidArgument for what is out of range."""
    if not -limits.MAX_PRIORITY <= retention.priority <= limits.MAX_PRIORITY:
        raise InvalidArgument(
            f"priority {retention.priority} is not from -{limits.MAX_PRIORITY} to"
            f" {limits.MAX_PRIORITY}"
        )
    return Retention(retention.priority, ttl_of(retention.ttl_ms))


def ttl_of(ttl_ms: int) -> int:
    """A time to live from the wire; raises InvalidArgument above MAX_TTL_MS."""
    if ttl_ms > limits.MAX_TTL_MS:
        raise InvalidArgument(f"ttl_ms {ttl_ms} is above {limits.MAX_TTL_MS}, a year")
    return ttl_ms


def fill_reply(reply: pb.Reply, kind: str, result: Any) -> int:
    """Write the result of an operation of this kind (a name of `Op`'s fields) into its Reply.

    Returns the bytes of block ids in it.
    """
    return _FILL[kind](reply, result)


def fill_miss(out: pb.MissReason, miss: Miss) -> None:
    """Write why a match is not longer."""
    out.kind = miss.kind.value
    out.at_token = miss.at_token
    if miss.nearest_tokens:
        out.nearest_tokens = miss.nearest_tokens


def _fill_onboarding(out: pb.Onboarding, onboarded: Onboarded) -> None:
    out.reason = onboarded.reason.value
    out.cpu_tokens = onboarded.cpu_tokens
    out.nvme_tokens = onboarded.nvme_tokens
    out.remote_tokens = onboarded.remote_tokens
    out.left_tokens = onboarded.left_tokens
    out.SetInParent()


def _fill_acquire(reply: pb.Reply, result: Acquired) -> int:
    out = reply.acquire
    out.lease_id = result.lease_id
    out.block_table = result.block_table
    out.cached_tokens = result.cached_tokens + result.tail_tokens
    out.being_computed = result.being_computed
    out.waited_ms = result.waited_ms
    fill_miss(out.miss, result.miss)
    if result.onboarding is not None:
        _fill_onboarding(out.onboarding, result.onboarding)
    return len(result.block_table)


def _fill_extend(reply: pb.Reply, result: Blocks) -> int:
    reply.extend.blocks = data = array("i", result).tobytes()
    return len(data)


def _fill_trim(reply: pb.Reply, result: Blocks) -> int:
    reply.trim.to_reserve = data = array("i", result).tobytes()
    return len(data)


def _fill_fork(reply: pb.Reply, result: Forked) -> int:
    reply.fork.tail_blocks = data = array("i", result.tail_blocks).tobytes()
    return len(data)


def _fill_commit(reply: pb.Reply, result: Committed) -> int:
    out = reply.commit
    out.published_tokens = result.published_tokens
    out.duplicate_blocks = result.duplicate_blocks
    return 0


def _fill_release(reply: pb.Reply, result: int) -> int:
    reply.release.cached_tokens = result
    return 0


def _fill_refill(reply: pb.Reply, result: Blocks) -> int:
    reply.refill.blocks = data = array("i", result).tobytes()
    return len(data)


def _fill_give_back(reply: pb.Reply, result: None) -> int:
    reply.give_back.SetInParent()
    return 0


_FILL: dict[str, Callable[[pb.Reply, Any], int]] = {
    "acquire": _fill_acquire,
    "extend": _fill_extend,
    "trim": _fill_trim,
    "fork": _fill_fork,
    "commit": _fill_commit,
    "release": _fill_release,
    "refill": _fill_refill,
    "give_back": _fill_give_back,
}
