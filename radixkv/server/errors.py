"""Errors that the server adds to those of the core, and every error's way onto the wire."""

from radixkv.core.errors import CacheError
from radixkv.v1 import session_pb2 as pb

MAX_MESSAGE_CHARS = 1000  # of an error's text on the wire


class Unavailable(CacheError):
    """Draining or stopping; try again later or elsewhere."""

    code = "UNAVAILABLE"


class PermissionDenied(CacheError):
    """This peer may not do that."""

    code = "PERMISSION_DENIED"


class ProtocolError(CacheError):
    """The peer broke the session's protocol; its stream cannot go on."""

    code = "INVALID_ARGUMENT"


def status_of(error: CacheError) -> pb.Status:
    """The wire's form of an error; its text is cut at MAX_MESSAGE_CHARS."""
    return status(error.code, str(error))


def status(code: str, message: str) -> pb.Status:
    """A Status of the code's name."""
    return pb.Status(code=pb.Code.Value(code), message=message[:MAX_MESSAGE_CHARS])
