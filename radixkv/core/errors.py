"""Typed errors of the core. Each carries the code that the wire and the client use too.

The caller's fault or the pool's state, never a bug: bugs are assertions.
"""


class CacheError(Exception):
    """Base of all errors the core raises to its callers; `code` names it on the wire."""

    code = "INTERNAL"


class InvalidArgument(CacheError):
    """Malformed or out of range; retrying the same call cannot help."""

    code = "INVALID_ARGUMENT"


class NotFound(CacheError):
    """No such session or lease."""

    code = "NOT_FOUND"


class AlreadyExists(CacheError):
    """The lease id is in use by a live or waiting lease of this session."""

    code = "ALREADY_EXISTS"


class Exhausted(CacheError):
    """No room now; a retry may succeed. The message says how much was wanted and is there."""

    code = "EXHAUSTED"


class TooLarge(CacheError):
    """The request can never fit; the message gives both numbers."""

    code = "TOO_LARGE"


class FailedPrecondition(CacheError):
    """Not allowed in this state, e.g. a fork above uncommitted blocks."""

    code = "FAILED_PRECONDITION"


class Cancelled(CacheError):
    """The waiting Acquire was released or its session ended."""

    code = "CANCELLED"
