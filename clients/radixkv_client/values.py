"""What goes into and comes out of operations, as frozen values."""

import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from radixkv.v1 import session_pb2 as pb
from radixkv_client.errors import InvalidArgument
from radixkv_client.tokens import block_ids

MAX_NUMBER = 2**31 - 1

REASONS = {
    "finished": pb.FINISHED,
    "aborted": pb.ABORTED,
    "preempted": pb.PREEMPTED,
    "conversation over": pb.CONVERSATION_OVER,
}


def whole_number(name: str, value: Any, lowest: int = 0) -> int:
    """An argument in [lowest, 2**31), of any integer type but bool; raises InvalidArgument."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not lowest <= number <= MAX_NUMBER:
        raise InvalidArgument(f"{name} {value!r} is not an integer from {lowest} to {MAX_NUMBER}")
    return number


@dataclass(frozen=True, slots=True)
class Scope:
    """The part of a namespace that varies between requests; `adapter` needs its version."""

    adapter: str = ""
    adapter_version: str = ""
    salt: str = ""

    @classmethod
    def from_proto(cls, scope: pb.Scope) -> "Scope":
        """From the message of a namespace."""
        return cls(scope.adapter, scope.adapter_version, scope.salt)

    def to_proto(self) -> pb.Scope:
        """The message that Acquire carries."""
        return pb.Scope(adapter=self.adapter, adapter_version=self.adapter_version, salt=self.salt)


@dataclass(frozen=True, slots=True)
class ContentRange:
    """Tokens [start, start + length) of the sequence are placeholders of one content."""

    start: int
    length: int
    content_id: bytes


@dataclass(frozen=True, slots=True)
class Retention:
    """How long cached blocks are kept, alike on every tier.

    `priority` -100 to 100: lower goes first, 0 is normal. `ttl_ms`: forgotten, with all that
    follows them, after so long; 0 = never.
    """

    priority: int = 0
    ttl_ms: int = 0

    def to_proto(self) -> pb.Retention:
        """The message; raises InvalidArgument."""
        try:
            return pb.Retention(priority=self.priority, ttl_ms=self.ttl_ms)
        except (ValueError, TypeError) as error:
            raise InvalidArgument(f"{self}: {error}") from None


@dataclass(frozen=True, slots=True)
class Onboarding:
    """What was done about tokens of the prompt that lay below the gpu.

    `reason` is a name of `Onboarding.Reason`. Tokens by place are a part of the lease's
    `cached_tokens`; `left_tokens` lay below and were not brought up.
    """

    reason: str
    cpu_tokens: int
    nvme_tokens: int
    remote_tokens: int
    left_tokens: int

    @classmethod
    def from_proto(cls, onboarding: pb.Onboarding) -> "Onboarding":
        """From the message of an Acquire's reply."""
        return cls(
            pb.Onboarding.Reason.Name(onboarding.reason),
            onboarding.cpu_tokens,
            onboarding.nvme_tokens,
            onboarding.remote_tokens,
            onboarding.left_tokens,
        )


@dataclass(frozen=True, slots=True)
class AcquireOptions:
    """What an Acquire asks for beside its tokens; waits are in milliseconds."""

    scope: Scope | None = None
    contents: Sequence[ContentRange] = ()
    extra_blocks: int = 0
    partial_tail: bool = False
    capacity_wait_ms: int = 0
    wait_ms: int = 0
    resumed: bool = False
    tags: Sequence[str] = ()
    retention: Retention | None = None

    def __post_init__(self) -> None:
        for name in ("extra_blocks", "capacity_wait_ms", "wait_ms"):
            whole_number(name, getattr(self, name))
        for name in ("partial_tail", "resumed"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument(f"{name} {getattr(self, name)!r} is not a bool")
        if isinstance(self.tags, str) or not all(
            isinstance(tag, str) and tag.isprintable() for tag in self.tags
        ):
            raise InvalidArgument(f"tags {self.tags!r} are not a sequence of printable texts")

    @property
    def max_wait_s(self) -> float:
        """How long the server may wait before it answers, in seconds."""
        return (self.capacity_wait_ms + self.wait_ms) / 1000


PLAIN = AcquireOptions()


@dataclass(frozen=True, slots=True)
class Miss:
    """Why no more was cached: a name of `MissReason.Kind`, the first token that is not cached, and
    for "DIVERGES" what the nearest branch has there."""

    kind: str
    at_token: int
    nearest_tokens: array = field(default_factory=lambda: array("i"))

    @classmethod
    def from_proto(cls, miss: pb.MissReason) -> "Miss":
        """From the message of an Acquire's or Lookup's reply."""
        kind = pb.MissReason.Kind.Name(miss.kind)
        return cls(kind, miss.at_token, block_ids(miss.nearest_tokens))


@dataclass(frozen=True, slots=True)
class Committed:
    """Tokens of the lease that are published, and blocks of this commit that the tree had."""

    published_tokens: int
    duplicate_blocks: int


def contents_to_proto(contents: Sequence[ContentRange]) -> list[pb.ContentRange]:
    """Messages of content ranges; raises InvalidArgument."""
    try:
        return [
            pb.ContentRange(start=part.start, length=part.length, content_id=part.content_id)
            for part in contents
        ]
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"contents: {error}") from None


def reason_to_proto(reason: str) -> "pb.ReleaseReason":
    """The wire's value of a release reason; raises InvalidArgument."""
    try:
        return REASONS[reason]
    except KeyError:
        raise InvalidArgument(f"reason {reason!r}: not one of {list(REASONS)}") from None
