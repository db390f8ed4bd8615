"""The remote: blocks as objects of a Mooncake Store cluster, shared with other servers.

An object is a record (see `records`) under a key made of the block's digest. All servers that know
the same cluster read and write the same objects; the cluster evicts as it likes.

Theory of operation. Nothing that comes back is believed: a block counts once its header names the
expected namespace, parent and tokens, and the bytes *in the block of the arena* hash to what the
header says. What is not so is removed. Objects pass through a buffer of our own in both directions,
because the library writes to a target whenever it gets round to it, also after it has reported a
failure or was given up; then the buffer is what suffers, not a block that somebody else has by now.
The buffer has two halves: one is filled or checked while the other one is on the wire.

Every call is bounded: the library's own limits (`remote_client`), and above them one of ours, after
which the call is left alone. States: up -> down until a time that a failing master doubles -> one
attempt -> up or down. While down, or while a call that was left alone is still under way, all
methods fail at once. So an unreachable cluster costs one timeout per attempt, and at most one
thread.
"""

import logging
import mmap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import TypeVar

import numpy as np

from radixkv.core.digest import EVERYTHING, TAG_BYTES, names_many
from radixkv.core.tier_ops import BlockIdentity, Outcome
from radixkv.pools import remote_client as mooncake
from radixkv.pools.checked_copy import copy_with_checksum
from radixkv.pools.records import (
    BadRecord,
    RecordLayout,
    decode_header,
    encode_header,
    same_block,
)
from radixkv.pools.remote_calls import BoundedCalls
from radixkv.pools.remote_client import MooncakeClient
from radixkv.pools.remote_url import parse_remote_url
from radixkv.pools.stores import Payload

log = logging.getLogger(__name__)

KEY_PREFIX = "radixkv/1/"
HALF_BYTES = 8 << 20  # of the buffer, or one record if that is larger
CONNECT_TIMEOUT_S = 6.0
TRANSFER_TIMEOUT_S = 6.0  # of one half
PROBE_TIMEOUT_S = 0.5  # a request waits for it
REMOVE_TIMEOUT_S = 6.0
CLOSE_TIMEOUT_S = 3.0
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0

T = TypeVar("T")
Blocks = range  # indices of one call


def key_of(digest: bytes) -> str:
    """The key of a block; the same in every process."""
    return KEY_PREFIX + digest.hex()


def _start_of(digest: bytes) -> str:
    """What all keys begin with that a digest names which names many."""
    return KEY_PREFIX if digest == EVERYTHING else KEY_PREFIX + digest[:TAG_BYTES].hex()


class RemoteStore:
    """An `ObjectStore` (see `stores`) in a Mooncake Store cluster."""

    def __init__(self, url: str, block_bytes: int, block_size: int) -> None:
        """Join the cluster, or go on trying later if that fails.

        Raises ValueError for a bad URL and RemoteUnavailable if Mooncake is not installed.
        """
        self.problem: str | None = None
        self._layout = RecordLayout(block_bytes, block_size)
        self._half_blocks = max(1, HALF_BYTES // self._layout.record_bytes)
        size = 2 * self._half_blocks * self._layout.record_bytes
        self._buffer = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        self._records = self._buffer.reshape(-1, self._layout.record_bytes)
        self._client = MooncakeClient(parse_remote_url(url), self._buffer.ctypes.data, size)
        self._calls = BoundedCalls("remote")
        self._backoff_s = 0.0
        self._retry_at_s = 0.0
        self._is_up()

    # ---- what movers ask for ----------------------------------------------------------------

    def write(
        self,
        namespace: bytes,
        identities: Sequence[BlockIdentity],
        payloads: Sequence[Payload],
        checksums: Sequence[int],
    ) -> list[Outcome]:
        """Store blocks: DONE (also if it was there) or FAILED each.

        Checksums are those of the payloads and are not checked here. Tags, priority and expiry are
        this server's own affair and are not stored.
        """

        def fill(block: int, record: Payload) -> None:
            plain = identities[block]._replace(tags=(), priority=0, expires_ms=None)
            header = encode_header(namespace, plain, checksums[block], 0, self._layout)
            start, end = len(header), len(header) + self._layout.block_bytes
            record[:start] = np.frombuffer(header, np.uint8)
            np.copyto(record[start:end], payloads[block])

        def judge(block: int, record: Payload, code: int) -> Outcome:
            if code == mooncake.OK:
                return Outcome.DONE
            self._note(f"put: {mooncake.explain(code)}")
            return Outcome.FAILED

        keys = [key_of(identity.digest) for identity in identities]
        return self._transfer(keys, self._client.put, fill, judge)

    def read(
        self, namespace: bytes, identities: Sequence[BlockIdentity], into: Sequence[Payload]
    ) -> list[Outcome]:
        """Fetch blocks. BAD: absent, not this block, or not its bytes; FAILED: no answer.

        What is there and BAD is removed.
        """
        wrong: list[bytes] = []

        def judge(block: int, record: Payload, code: int) -> Outcome:
            if code in (mooncake.NOT_FOUND, mooncake.NOT_READY):
                self._note("get: the object is gone")
                return Outcome.BAD
            if code < 0 and code != mooncake.BUFFER_TOO_SMALL:
                self._note(f"get: {mooncake.explain(code)}")
                return Outcome.FAILED
            try:
                if code != self._layout.record_bytes:
                    raise BadRecord("old layout")
                self._unpack(record, namespace, identities[block], into[block])
            except BadRecord as error:
                self._note(f"get: an object was not the block it is kept for: {error.kind}")
                log.error("%s; it is removed", self.problem)
                wrong.append(identities[block].digest)
                return Outcome.BAD
            return Outcome.DONE

        keys = [key_of(identity.digest) for identity in identities]
        outcomes = self._transfer(keys, self._client.get, None, judge)
        if wrong:
            self.remove(wrong)
        return outcomes

    def probe(self, digests: Sequence[bytes]) -> list[bool] | None:
        """Which of these are there now; None if nobody answered."""
        keys = [key_of(digest) for digest in digests]
        codes = self._ask(lambda: self._client.exist(keys), PROBE_TIMEOUT_S)
        return None if codes is None else [code == 1 for code in codes]

    def remove(self, digests: Sequence[bytes]) -> bool:
        """Remove objects; a digest may name many. True once none of them can be read any more."""
        keys = [key_of(digest) for digest in digests if not names_many(digest)]
        starts = [_start_of(digest) for digest in digests if names_many(digest)]
        codes = self._ask(lambda: self._client.remove(keys, starts), REMOVE_TIMEOUT_S)
        if codes is None:
            return False
        left = [code for code in codes if code not in (mooncake.OK, mooncake.NOT_FOUND)]
        if left:
            self._note(f"remove: {mooncake.explain(left[0])}")
        return not left

    def close(self) -> None:
        """Leave the cluster; idempotent. What it held in our segment is gone then."""
        if not self._calls.is_busy and self._client.is_connected:
            try:
                self._calls.call(self._client.close, CLOSE_TIMEOUT_S)
            except TimeoutError:
                log.warning("Mooncake's client did not end within %s s", CLOSE_TIMEOUT_S)
        self._calls.close()
        self._retry_at_s = float("inf")

    # ---- transfers through the buffer -------------------------------------------------------

    def _transfer(
        self,
        keys: list[str],
        move: Callable[[list[str], list[int], int], list[int]],
        fill: Callable[[int, Payload], None] | None,
        judge: Callable[[int, Payload, int], Outcome],
    ) -> list[Outcome]:
        """Outcomes of all keys. After a half that is not all DONE no further one is begun."""
        outcomes: list[Outcome] = []
        under_way: tuple[Blocks, Future[list[int]]] | None = None
        starts = range(0, len(keys), self._half_blocks) if self._is_up() else range(0)
        for number, start in enumerate([*starts, len(keys)]):
            blocks = range(start, min(start + self._half_blocks, len(keys)))
            following = None
            if blocks and outcomes.count(Outcome.DONE) == len(outcomes):
                following = (blocks, self._begin(number % 2, blocks, keys, move, fill))
            if under_way is not None:
                outcomes += self._end(1 - number % 2, *under_way, judge)
            under_way = following
        return outcomes + [Outcome.FAILED] * (len(keys) - len(outcomes))

    def _begin(
        self,
        half: int,
        blocks: Blocks,
        keys: list[str],
        move: Callable[[list[str], list[int], int], list[int]],
        fill: Callable[[int, Payload], None] | None,
    ) -> Future[list[int]]:
        records = self._half(half)
        if fill is not None:
            for record, block in zip(records, blocks, strict=False):
                fill(block, record)
        addresses = [record.ctypes.data for record in records[: len(blocks)]]
        named = keys[blocks.start : blocks.stop]
        return self._calls.start(lambda: move(named, addresses, self._layout.record_bytes))

    def _end(
        self,
        half: int,
        blocks: Blocks,
        future: Future[list[int]],
        judge: Callable[[int, Payload, int], Outcome],
    ) -> list[Outcome]:
        codes = self._await(future, TRANSFER_TIMEOUT_S)
        if codes is None:
            return [Outcome.FAILED] * len(blocks)
        pairs = zip(blocks, self._half(half), codes, strict=False)
        return [judge(block, record, code) for block, record, code in pairs]

    def _half(self, half: int) -> Payload:
        return self._records[half * self._half_blocks : (half + 1) * self._half_blocks]

    def _unpack(
        self, record: Payload, namespace: bytes, identity: BlockIdentity, into: Payload
    ) -> None:
        """Copy the payload out of a record; raises BadRecord unless all of it is as expected."""
        header = decode_header(record[: self._layout.header_bytes].data, self._layout)
        if header.namespace != namespace or not same_block(header.identity, identity):
            raise BadRecord("foreign")
        start = self._layout.header_bytes
        payload = record[start : start + self._layout.block_bytes]
        if copy_with_checksum(payload, into) != header.checksum:
            raise BadRecord("torn")

    # ---- one call, and what becomes of the connection ---------------------------------------

    def _ask(self, call: Callable[[], list[int]], timeout_s: float) -> list[int] | None:
        return self._await(self._calls.start(call), timeout_s) if self._is_up() else None

    def _await(self, future: Future[list[int]], timeout_s: float) -> list[int] | None:
        """Codes of a call; None if it did not end, or failed because of the master."""
        codes = self._result(future, timeout_s)
        if codes is None:
            return None
        for code in codes:
            if mooncake.is_masters_fault(code):
                self._down(mooncake.explain(code))
                return None
        self._backoff_s = 0.0
        return codes

    def _result(self, future: Future[T], timeout_s: float) -> T | None:
        try:
            return future.result(timeout_s)
        except CancelledError:
            return None  # the call before it was given up
        except TimeoutError:
            self._down(f"a call to Mooncake did not end within {timeout_s} s")
        except Exception as error:
            self._down(str(error) or type(error).__name__)
        self._calls.give_up()
        return None

    def _is_up(self) -> bool:
        """Whether a call may be made; connects if that is due."""
        if self._calls.is_busy or time.monotonic() < self._retry_at_s:
            return False
        if not self._client.is_connected:
            self._result(self._calls.start(self._client.connect), CONNECT_TIMEOUT_S)
        return self._client.is_connected

    def _down(self, problem: str) -> None:
        self._note(problem)
        self._backoff_s = min(max(2 * self._backoff_s, FIRST_BACKOFF_S), MAX_BACKOFF_S)
        self._retry_at_s = time.monotonic() + self._backoff_s

    def _note(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("remote: %s", problem)
        self.problem = problem
