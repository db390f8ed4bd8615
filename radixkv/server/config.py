"""Where settings come from: flags > environment (RADIXKV_*) > TOML file > defaults.

A key that does not exist is an error that names it and the closest one that does.
"""

import argparse
import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from radixkv.server.settings import OPTIONS, Address, Option, Settings, shown

MAX_CONFIG_BYTES = 1 << 20
CONFIG_FLAG = "--config"
CONFIG_VARIABLE = "RADIXKV_CONFIG"


class ConfigError(Exception):
    """A setting is missing, unknown or malformed; the message names it and where it came from."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Effective settings, and where each value came from ("flag --block-size", "default", …)."""

    settings: Settings
    sources: Mapping[str, str]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser() -> argparse.ArgumentParser:
    """The command line of radixkv-server. Parsing raises `ConfigError` instead of exiting."""
    parser = _Parser(
        prog="radixkv-server",
        description="Owns the KV cache of LLM inference on this machine.",
        epilog="Every option can also be set as RADIXKV_<OPTION> in the environment or as a key "
        "of the TOML file, e.g. RADIXKV_GPU_BLOCKS=40000 or gpu_blocks = 40000. "
        "Flags win over the environment, the environment over the file.",
        allow_abbrev=False,
    )
    for option in OPTIONS:
        text = option.help + _default_text(option)
        if option.is_switch:
            action = argparse.BooleanOptionalAction
            parser.add_argument(option.flag, action=action, default=None, help=text)
        else:
            parser.add_argument(option.flag, metavar=option.metavar, help=text)
    parser.add_argument(CONFIG_FLAG, metavar="FILE.toml", help="file with settings")
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the effective settings and where each came from, then exit",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    return parser


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; raises `ConfigError` naming an unknown flag and the closest one."""
    parser = build_parser()
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        name = unknown[0].split("=", 1)[0]
        raise ConfigError(f"unknown option {shown(unknown[0])}{_closest(name, flags)}")
    return namespace


def load(namespace: argparse.Namespace, environ: Mapping[str, str]) -> Loaded:
    """Merge all sources and check the result; raises `ConfigError`."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    config_path = namespace.config or environ.get(CONFIG_VARIABLE)
    from_file = _read_file(Path(config_path)) if config_path else {}
    _check_variables(environ)
    for option in OPTIONS:
        raw, source = _find(option, namespace, environ, from_file, config_path)
        try:
            values[option.name] = None if raw is None else option.parse(raw)
        except ValueError as error:
            raise ConfigError(f"{option.name} (from {source}) {error}") from None
        sources[option.name] = source
    _check_together(values)
    return Loaded(Settings(**values), sources)


def format_config(loaded: Loaded) -> str:
    """The effective settings as a TOML file, with the source of each as a comment."""
    lines = []
    for option in OPTIONS:
        value = getattr(loaded.settings, option.name)
        source = loaded.sources[option.name]
        if value is None and option.default is None:
            lines.append(f"# {option.name} is unset ({source})")
        else:
            lines.append(f"{option.name} = {_toml(value)}  # {source}")
    return "\n".join(lines)


def _find(
    option: Option,
    namespace: argparse.Namespace,
    environ: Mapping[str, str],
    from_file: Mapping[str, Any],
    config_path: str | None,
) -> tuple[Any, str]:
    """The raw value of the source that wins, and that source's name."""
    flag = getattr(namespace, option.name)
    if flag is not None:
        return flag, f"flag {option.flag}"
    if option.variable in environ:
        return environ[option.variable], f"environment {option.variable}"
    if option.name in from_file:
        return from_file[option.name], f"file {config_path}"
    return (option.default() if callable(option.default) else option.default), "default"


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes")
        values = tomllib.loads(text.decode())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror} ({CONFIG_FLAG})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    names = [option.name for option in OPTIONS]
    for key in values:
        if key not in names:
            raise ConfigError(f"unknown key {shown(key)} in {path}{_closest(key, names)}")
    return values


def _check_variables(environ: Mapping[str, str]) -> None:
    names = [option.variable for option in OPTIONS] + [CONFIG_VARIABLE]
    for name in environ:
        if name.startswith("RADIXKV_") and name not in names:
            raise ConfigError(f"unknown environment variable {name}{_closest(name, names)}")


def _check_together(values: Mapping[str, Any]) -> None:
    if values["gpu_blocks"] is None:
        raise ConfigError("gpu_blocks is not set: say how many blocks, e.g. --gpu-blocks 40000")
    if values["device"] == "cuda":
        raise ConfigError("device cuda is not supported by this version: use --device cpu")
    _check_tiers(values)
    if values["admin_token_file"] is not None:
        return
    for name in ("listen", "http"):
        address: Address | None = values[name]
        if address is not None and not address.is_loopback:
            raise ConfigError(
                f"{name} {address} can be reached from other machines: set --admin-token-file, "
                f"or a loopback address, or --{name} off"
            )


def _check_tiers(values: Mapping[str, Any]) -> None:
    if values["nvme_path"] is None and values["nvme_blocks"]:
        raise ConfigError("nvme_blocks is set without nvme_path: say where, e.g. --nvme-path DIR")
    if values["nvme_path"] is not None and not values["nvme_blocks"]:
        raise ConfigError(
            "nvme_path is set without nvme_blocks: say how many, e.g. --nvme-blocks 100000"
        )
    for name in ("cpu_blocks", "nvme_blocks", "remote"):
        if values[name] and values["kv_spec"] is None:
            raise ConfigError(
                f"{name} needs kv_spec, so that all tiers are there before the server is ready:"
                " set --kv-spec NAME or FILE"
            )
    low, high = values["low_watermark"], values["high_watermark"]
    if low > high:
        raise ConfigError(f"low_watermark {low:g} is above high_watermark {high:g}")


def _closest(name: str, names: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""


def _default_text(option: Option) -> str:
    default = option.default() if callable(option.default) else option.default
    if default is None or (option.is_switch and default == "false"):
        return ""
    return f" (default {default})"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    return json.dumps("off" if value is None else str(value), ensure_ascii=False)
