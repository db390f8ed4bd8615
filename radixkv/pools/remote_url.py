"""Where the remote is, as one URL; what each part means is in docs/remote.md."""

import difflib
import ipaddress
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

SCHEME = "mooncake"
EXAMPLE = "mooncake://127.0.0.1:50051"
PROTOCOLS = ("tcp", "rdma")
PEER_TO_PEER = "P2PHANDSHAKE"  # Mooncake's word for: no metadata service
PARAMETERS = ("host", "metadata", "protocol", "device", "segment_gib", "replicas")
MAX_SEGMENT_GIB = 16_384.0
MAX_REPLICAS = 16
MAX_URL_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """A parsed URL. `host` is what other machines know this one by."""

    master: str
    host: str = "127.0.0.1"
    metadata: str = PEER_TO_PEER
    protocol: str = "tcp"
    device: str = ""
    segment_bytes: int = 1 << 30
    replicas: int = 1

    @property
    def is_local(self) -> bool:
        """Whether this machine takes part under an address that no other machine can reach."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it; names other than localhost count as not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_remote_url(text: str) -> RemoteUrl:
    """Read `mooncake://MASTER:PORT[?host=…&protocol=…]`.

    Raises ValueError that names the part, worded to follow the name of a setting.
    """
    if not isinstance(text, str) or not text.isprintable() or not 0 < len(text) <= MAX_URL_CHARS:
        raise ValueError(f"must be a URL like {EXAMPLE}")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"is not a URL ({error}); it looks like {EXAMPLE}") from None
    _check_address(parts, port)
    values = _parameters(parts.query)
    master_host = parts.hostname or ""
    if not is_loopback(master_host) and "host" not in values:
        raise ValueError(
            f"needs host=ADDRESS: the master {master_host} is another machine, so others have to "
            "know the address of this one"
        )
    shown_host = f"[{master_host}]" if ":" in master_host else master_host
    return RemoteUrl(master=f"{shown_host}:{port}", **values)


def _check_address(parts: SplitResult, port: int | None) -> None:
    if parts.scheme != SCHEME:
        raise ValueError(f"has scheme {parts.scheme!r}, and only {SCHEME} is known: {EXAMPLE}")
    if parts.username is not None or parts.password is not None:
        raise ValueError("has a user name or password; Mooncake knows neither")
    if not parts.hostname:
        raise ValueError(f"has no host of the master: {EXAMPLE}")
    if not port:
        raise ValueError(f"has no port of the master (its default is 50051): {EXAMPLE}")
    if parts.path not in ("", "/") or parts.fragment:
        raise ValueError(f"has {parts.path + parts.fragment!r} behind the port: {EXAMPLE}")


def _parameters(query: str) -> dict[str, Any]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise ValueError(f"has {query!r} behind the '?', not name=value&name=value") from None
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name not in _READERS:
            matches = difflib.get_close_matches(name, PARAMETERS, n=1, cutoff=0.5)
            known = f"did you mean {matches[0]}?" if matches else f"known: {', '.join(PARAMETERS)}"
            raise ValueError(f"has an unknown parameter {name!r}; {known}")
        field, read = _READERS[name]
        if field in values:
            raise ValueError(f"has {name} twice")
        try:
            values[field] = read(value)
        except ValueError as error:
            raise ValueError(f"has {name}={value!r}, {error}") from None
    return values


def _host(value: str) -> str:
    if not value or not all(c.isalnum() or c in ".-:" for c in value):
        raise ValueError("which is neither an address nor the name of a machine")
    return value


def _metadata(value: str) -> str:
    if value == PEER_TO_PEER or value.startswith(("http://", "etcd://", "redis://")):
        return value
    raise ValueError(f"which is neither {PEER_TO_PEER} nor an http, etcd or redis URL")


def _protocol(value: str) -> str:
    if value not in PROTOCOLS:
        raise ValueError(f"known are {', '.join(PROTOCOLS)}")
    return value


def _segment_bytes(value: str) -> int:
    expected = f"which is not a number of GiB 0–{MAX_SEGMENT_GIB:.0f}"
    try:
        gib = float(value)
    except ValueError:
        raise ValueError(expected) from None
    if not (math.isfinite(gib) and 0 <= gib <= MAX_SEGMENT_GIB):
        raise ValueError(expected)
    return int(gib * (1 << 30))


def _replicas(value: str) -> int:
    if not value.isdecimal() or not 1 <= int(value) <= MAX_REPLICAS:
        raise ValueError(f"which is not a whole number 1–{MAX_REPLICAS}")
    return int(value)


_READERS: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "host": ("host", _host),
    "metadata": ("metadata", _metadata),
    "protocol": ("protocol", _protocol),
    "device": ("device", str),
    "segment_gib": ("segment_bytes", _segment_bytes),
    "replicas": ("replicas", _replicas),
}
