"""The server's settings as values, and how each is read from text. No I/O but path handling."""

import ipaddress
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.core.results import CacheConfig
from radixkv.pools.remote_url import parse_remote_url
from radixkv.wire.limits import MAX_BLOCK_SIZE
from radixkv.wire.paths import default_socket_dir

MAX_BLOCKS = 1 << 24  # of one tier
MAX_MOVERS = 8
MAX_WATERMARK = 50  # percent
MAX_SECONDS = 7 * 24 * 3600.0
DEVICES = ("auto", "cuda", "cpu")
EVICTIONS = ("lru",)
WRITE_POLICIES = ("write_back", "write_through", "selective")
ONBOARDINGS = ("wait", "best_effort", "timeout")
VERIFICATIONS = ("sample", "all")


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address; port 0 asks for a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it; names other than localhost count as not."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True, slots=True)
class Settings:
    """Effective settings of one server; see `OPTIONS` for what each means. None = off or unset."""

    gpu_blocks: int
    device: str
    kv_spec: str | None
    block_size: int
    socket_dir: Path
    listen: Address | None
    http: Address | None
    eviction: str
    check_invariants: bool
    prefault: bool
    drain_timeout: float
    session_alarm: float
    admin_token_file: Path | None
    cpu_blocks: int
    nvme_path: Path | None
    nvme_blocks: int
    remote: str | None
    write_policy: str
    low_watermark: float
    high_watermark: float
    onboarding: str
    onboard_timeout: float
    break_even: bool
    verify: str
    movers: int
    max_pinned: float

    @property
    def has_tiers(self) -> bool:
        """Whether there is any place below the gpu."""
        return bool(self.cpu_blocks or self.nvme_blocks or self.remote)

    def cache_config(self) -> CacheConfig:
        """What of this concerns the core, in its units."""
        return CacheConfig(
            num_blocks=self.gpu_blocks,
            block_size=self.block_size,
            eviction=self.eviction,
            cpu_blocks=self.cpu_blocks,
            nvme_blocks=self.nvme_blocks,
            remote=self.remote is not None,
            write_policy=self.write_policy,
            low_watermark=self.low_watermark / 100,
            high_watermark=self.high_watermark / 100,
            onboarding=self.onboarding,
            onboard_timeout_ms=round(self.onboard_timeout * 1000),
            break_even=self.break_even,
            max_pinned=self.max_pinned / 100,
        )


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: `parse` turns text (or a TOML value) into its value, raising ValueError.

    `default` is such a text too, a function making one, or None (unset).
    """

    name: str
    metavar: str
    parse: Callable[[Any], Any]
    default: Callable[[], str] | str | None
    help: str

    @property
    def flag(self) -> str:
        """E.g. "--gpu-blocks"."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """E.g. "RADIXKV_GPU_BLOCKS"."""
        return "RADIXKV_" + self.name.upper()

    @property
    def is_switch(self) -> bool:
        """A flag without a value."""
        return self.parse is parse_switch


def whole_number(low: int, high: int) -> Callable[[Any], int]:
    """Parser of whole numbers low..high."""

    def parse(value: Any) -> int:
        expected = f"must be a whole number {low}–{high}, not {shown(value)}"
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(expected)
        try:
            number = int(value)
        except ValueError:
            raise ValueError(expected) from None
        if not low <= number <= high:
            raise ValueError(expected)
        return number

    return parse


def number(high: float, unit: str) -> Callable[[Any], float]:
    """Parser of numbers from 0 to `high`; `unit` names what they count."""

    def parse(value: Any) -> float:
        expected = f"must be a number of {unit} 0–{high:.0f}, not {shown(value)}"
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(expected)
        try:
            parsed = float(value)
        except (ValueError, OverflowError):
            raise ValueError(expected) from None
        if not (math.isfinite(parsed) and 0 <= parsed <= high):
            raise ValueError(expected)
        return parsed

    return parse


parse_seconds = number(MAX_SECONDS, "seconds")


def parse_switch(value: Any) -> bool:
    """True or false, in TOML or as 1/0, true/false, yes/no, on/off."""
    text = str(value).lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"must be true or false, not {shown(value)}")


def parse_text(value: Any) -> str:
    """Any non-empty text."""
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError(f"must be printable text, not {shown(value)}")
    return value


def choice(*choices: str) -> Callable[[Any], str]:
    """Parser of one of some words."""

    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, not {shown(value)}")
        return str(value)

    return parse


def parse_path(value: Any) -> Path:
    """A path, ~ expanded, made absolute."""
    return Path(parse_text(value)).expanduser().absolute()


def parse_address(value: Any) -> Address | None:
    """HOST:PORT or [IPV6]:PORT; None for "off"."""
    if value == "off":
        return None
    expected = f"must be HOST:PORT (port 0 = any free one) or off, not {shown(value)}"
    host, colon, port = str(value).rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(expected)
    if not (colon and host and port.isascii() and port.isdigit() and int(port) <= 65_535):
        raise ValueError(expected)
    if not all(character.isalnum() or character in ".:-_%" for character in host):
        raise ValueError(expected)
    return Address(host, int(port))


def parse_remote(value: Any) -> str:
    """The URL of a remote store, as it was given."""
    parse_remote_url(value)
    return str(value)


def shown(value: Any) -> str:
    """A value as an error message quotes it, shortened."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


OPTIONS: tuple[Option, ...] = (
    Option("gpu_blocks", "N", whole_number(1, MAX_BLOCKS), None,
           "blocks in the gpu pool (required)"),
    Option("device", "auto|cuda|cpu", choice(*DEVICES), "auto",
           "where the gpu pool is; cpu keeps it in host memory"),
    Option("kv_spec", "NAME|FILE", parse_text, None,
           "what one block holds: a built-in name such as llama-3-8b or a Hugging Face config.json,"
           " optionally with :DTYPE; unset, the first worker's Hello fixes it"),
    Option("block_size", "TOKENS", whole_number(1, MAX_BLOCK_SIZE), "16", "tokens per block"),
    Option("socket_dir", "DIR", parse_path, lambda: str(default_socket_dir()),
           "holds attach.sock, grpc.sock and the lock"),
    Option("listen", "HOST:PORT|off", parse_address, "127.0.0.1:7600", "gRPC over TCP, for tools"),
    Option("http", "HOST:PORT|off", parse_address, "127.0.0.1:7601",
           "HTTP: /healthz, /readyz and /stats"),
    Option("eviction", "lru", choice(*EVICTIONS), "lru", "which cached blocks go first"),
    Option("check_invariants", "", parse_switch, "false",
           "verify every invariant after each batch of operations (slow)"),
    Option("prefault", "", parse_switch, "false", "allocate the whole pool's memory at once"),
    Option("drain_timeout", "SECONDS", parse_seconds, "30",
           "how long SIGTERM waits for leases to end"),
    Option("session_alarm", "SECONDS", parse_seconds, "60",
           "raise an alarm for a session that is silent this long while it holds blocks"),
    Option("admin_token_file", "FILE", parse_path, None,
           "file with the token for changing calls over TCP; needed to listen beyond loopback"),
    Option("cpu_blocks", "N", whole_number(0, MAX_BLOCKS), "0",
           "blocks in the cpu tier, in host memory; a lower tier needs --kv-spec"),
    Option("nvme_path", "DIR", parse_path, None, "where the nvme tier keeps its segment files"),
    Option("nvme_blocks", "N", whole_number(0, MAX_BLOCKS), "0",
           "blocks in the nvme tier, preallocated in --nvme-path"),
    Option("remote", "URL", parse_remote, None,
           "a shared store beside the tiers: mooncake://HOST:PORT of its master (docs/remote.md)"),
    Option("write_policy", "|".join(WRITE_POLICIES), choice(*WRITE_POLICIES), "write_back",
           "copy blocks down before their room is needed, at once when they are published, or once"
           " they have been hit"),
    Option("low_watermark", "PERCENT", number(MAX_WATERMARK, "percent"), "5",
           "part of a tier that is kept free or clean: below it, blocks are copied down"),
    Option("high_watermark", "PERCENT", number(MAX_WATERMARK, "percent"), "10",
           "where copying down ends again"),
    Option("onboarding", "|".join(ONBOARDINGS), choice(*ONBOARDINGS), "wait",
           "whether an Acquire waits for blocks from below the gpu, is answered at once, or waits"
           " up to --onboard-timeout"),
    Option("onboard_timeout", "SECONDS", parse_seconds, "1", "for --onboarding timeout"),
    Option("break_even", "", parse_switch, "true",
           "leave blocks below the gpu that are computed faster than brought up"),
    Option("verify", "|".join(VERIFICATIONS), choice(*VERIFICATIONS), "sample",
           "checksums of blocks from the cpu tier: of one in 16, or of all; those from nvme and"
           " the remote always are"),
    Option("movers", "N", whole_number(1, MAX_MOVERS), "1", "processes that copy between tiers"),
    Option("max_pinned", "PERCENT", number(100, "percent"), "50", "part of a tier that pins may"
           " hold"),
)  # fmt: skip
