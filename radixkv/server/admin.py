"""The admin token: what lets a caller change things over TCP."""

import hmac
from pathlib import Path

MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 4096
SCHEME = "bearer"


class TokenError(ValueError):
    """The token file cannot be used; the message says why, never the token."""


class AdminToken:
    """A secret; compared in constant time and never shown."""

    def __init__(self, token: str) -> None:
        """Raises `TokenError` if it is too short, too long or not plain text."""
        if not MIN_TOKEN_CHARS <= len(token) <= MAX_TOKEN_CHARS:
            raise TokenError(f"must have {MIN_TOKEN_CHARS}–{MAX_TOKEN_CHARS} characters")
        if not (token.isascii() and token.isprintable()) or " " in token:
            raise TokenError("must be one line of ASCII without spaces")
        self._token = token.encode()

    def __repr__(self) -> str:
        return "AdminToken(…)"

    @classmethod
    def read(cls, path: Path) -> "AdminToken":
        """Read a token from the first line of a file; raises `TokenError` naming the file."""
        try:
            with path.open("rb") as file:
                text = file.read(MAX_TOKEN_CHARS + 2).decode("ascii")
            return cls(text.strip())
        except OSError as error:
            raise TokenError(f"admin_token_file {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise TokenError(f"admin_token_file {path} must be ASCII text") from None
        except TokenError as error:
            raise TokenError(f"admin_token_file {path}: the token {error}") from None

    def allows(self, authorization: str) -> bool:
        """Whether an `authorization` value is "Bearer <this token>"."""
        scheme, _, presented = authorization.partition(" ")
        same = hmac.compare_digest(presented.encode(errors="replace"), self._token)
        return same and scheme.lower() == SCHEME
