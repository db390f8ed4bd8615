"""G2: the admin token."""

import hmac
from pathlib import Path

import pytest

from radixkv.server.admin import AdminToken, TokenError

TOKEN = "0123456789abcdef"


def test_only_the_exact_token_is_allowed() -> None:
    token = AdminToken(TOKEN)
    assert token.allows(f"Bearer {TOKEN}")
    assert token.allows(f"bearer {TOKEN}")
    for presented in ("", TOKEN, "Bearer", "Bearer ", f"Bearer {TOKEN} ", f"Basic {TOKEN}",
                      f"Bearer {TOKEN[:-1]}", "Bearer \u00e9\udc80"):  # fmt: skip
        assert not token.allows(presented), presented


def test_comparison_is_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    token = AdminToken(TOKEN)
    token.allows(f"Bearer {TOKEN}")
    token.allows("Basic x")
    assert compared == [(TOKEN.encode(), TOKEN.encode()), (b"x", TOKEN.encode())]


def test_the_token_is_never_shown() -> None:
    assert TOKEN not in repr(AdminToken(TOKEN))


def test_reading_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    assert AdminToken.read(path).allows(f"Bearer {TOKEN}")


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 5000, b"two words of 16 x", b"\xff" * 20,
                                     b"a" * 16 + b"\n" + b"b" * 16])  # fmt: skip
def test_bad_files_are_named_but_not_quoted(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(TokenError, match=str(path)) as caught:
        AdminToken.read(path)
    assert "a" * 16 not in str(caught.value)
    with pytest.raises(TokenError, match="absent"):
        AdminToken.read(tmp_path / "absent")
