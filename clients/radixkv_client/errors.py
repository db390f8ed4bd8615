"""The client's exception tree. Names equal those of the core and of `Code` on the wire."""


class RadixKVError(Exception):
    """Base of all errors of this client. `retryable`: the same call may succeed later."""

    code = "INTERNAL"
    retryable = False


class InvalidArgument(RadixKVError):
    """Malformed or out of range; retrying the same call cannot help."""

    code = "INVALID_ARGUMENT"


class NotFound(RadixKVError):
    """The server knows no such lease or session."""

    code = "NOT_FOUND"


class AlreadyExists(RadixKVError):
    """The lease id is in use."""

    code = "ALREADY_EXISTS"


class Exhausted(RadixKVError):
    """No room now; the message says how much was wanted and is there."""

    code = "EXHAUSTED"
    retryable = True


class TooLarge(RadixKVError):
    """The request can never fit."""

    code = "TOO_LARGE"


class FailedPrecondition(RadixKVError):
    """Not allowed in this state, e.g. a fork above uncommitted blocks."""

    code = "FAILED_PRECONDITION"


class PermissionDenied(RadixKVError):
    """The caller may not do this here."""

    code = "PERMISSION_DENIED"


class Unavailable(RadixKVError):
    """The server is draining, gone or restarted. After a restart every lease is lost."""

    code = "UNAVAILABLE"
    retryable = True


class Cancelled(RadixKVError):
    """The waiting Acquire was released, or the client was closed."""

    code = "CANCELLED"


class Unimplemented(RadixKVError):
    """The server does not do this yet."""

    code = "UNIMPLEMENTED"


class Internal(RadixKVError):
    """A bug, in the server or in this client."""

    code = "INTERNAL"


class DeadlineExceeded(RadixKVError):
    """No answer within `timeout`. A timed-out acquire is cancelled; other operations may have
    been carried out."""

    code = "DEADLINE_EXCEEDED"
    retryable = True


class WrongProcess(RadixKVError):
    """The object was created in another process (before a fork); connect anew in this one."""

    code = "WRONG_PROCESS"


_BY_CODE = {
    error.code: error
    for error in (
        InvalidArgument,
        NotFound,
        AlreadyExists,
        Exhausted,
        TooLarge,
        FailedPrecondition,
        PermissionDenied,
        Unavailable,
        Cancelled,
        Unimplemented,
        Internal,
        DeadlineExceeded,
    )
}


def error_named(code: str, message: str) -> RadixKVError:
    """The error for a code's name; an unknown name is `Internal` and says so."""
    error = _BY_CODE.get(code)
    return error(message) if error is not None else Internal(f"unknown code {code}: {message}")


def fresh(error: RadixKVError) -> RadixKVError:
    """A copy to raise, for an error that is raised to several callers."""
    return type(error)(*error.args)
