"""What a client has while it is connected to one run of the server; a restart brings a new one."""

from radixkv.v1 import session_pb2 as pb
from radixkv_client.errors import RadixKVError, fresh
from radixkv_client.pool import PoolMapping
from radixkv_client.protocol import Answer, Request, Session
from radixkv_client.reserve import Reserve
from radixkv_client.tokens import block_ids


class Connected:
    """One session: its Steps, reserve, pool mapping and ids. Not thread-safe."""

    def __init__(self, token: bytes, hello: pb.HelloReply, pool: PoolMapping) -> None:
        self.token = token
        self.hello = hello
        self.pool = pool
        self.block_size: int = hello.block_size
        self.session = Session(hello.limits, self._on_pressure)
        self.reserve = Reserve(hello.limits.max_reserve_blocks)
        self.pressure = 0
        self.refilling: Answer | None = None  # the latest Refill's
        self._last_lease_id = 0

    def next_lease_id(self) -> int:
        """An id no lease of this session has had."""
        self._last_lease_id += 1
        return self._last_lease_id

    def check(self) -> None:
        """Raise the session's failure if it has ended."""
        if self.session.failure is not None:
            raise fresh(self.session.failure)

    def refill_request(self, num_blocks: int) -> Request:
        """Bring blocks into the reserve; its reply adds them, its result says how many."""
        op = pb.Op()
        op.refill.num_blocks = num_blocks
        return Request(op, lambda reply: self.reserve.add(block_ids(reply.refill.blocks)))

    def give_back_request(self, num_blocks: int) -> Request | None:
        """Return up to so many free blocks of the reserve; None if there are none."""
        blocks = self.reserve.withdraw(num_blocks)
        if not blocks:
            return None
        op = pb.Op()
        op.give_back.blocks = blocks.tobytes()

        def refused(error: RadixKVError) -> None:
            self.reserve.add(blocks)

        return Request(op, lambda reply: len(blocks), refused)

    def _on_pressure(self, num_blocks: int) -> None:
        """Give reserve back at once; what is still missing is the worker's to free."""
        before = self.reserve.num_free
        if (request := self.give_back_request(num_blocks)) is not None:
            self.session.submit([request])
        self.pressure = max(num_blocks - (before - self.reserve.num_free), 0)
