"""`radixkv-worker`: a model served over HTTP from the shared pool of a radixkv-server."""

import argparse
import asyncio
import ipaddress
import signal
import sys
from collections.abc import Sequence

import torch
from aiohttp import web

from radixkv import __version__
from radixkv_client import Client, KVSpec
from radixkv_client.errors import RadixKVError
from radixkv_worker import weights
from radixkv_worker.config import UnsupportedModel
from radixkv_worker.engine import Engine
from radixkv_worker.http_server import Api
from radixkv_worker.scheduler import SchedulerLimits

SHUTDOWN_S = 5.0  # running requests may take so long to finish after SIGTERM
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        loaded = weights.load(options.model, DTYPES[options.dtype])
        client = connect(loaded, options.socket_dir, options.transport, options.block_size)
    except (UnsupportedModel, RadixKVError) as error:
        print(f"radixkv-worker: {error}", file=sys.stderr)
        return 1
    engine = Engine(loaded, client, _limits(options), options.max_requests)
    engine.start()
    return asyncio.run(_serve(engine, *options.listen))


def connect(
    loaded: weights.LoadedModel,
    socket_dir: str | None = None,
    transport: str = "local",
    block_size: int = 16,
) -> Client:
    """Connect to the server as a worker of this model; raises what Client.connect does."""
    config = loaded.model.config
    spec = KVSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        value_head_dim=config.head_dim,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        block_size=block_size,
    )
    return Client.connect(
        socket_dir,
        model=loaded.fingerprint,
        kv_spec=spec,
        transport=transport,
        client_name=f"radixkv-worker {__version__}",
    )


async def _serve(engine: Engine, host: str, port: int) -> int:
    """Serve until told to stop, or until the engine fails."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    engine_end = asyncio.create_task(asyncio.to_thread(engine.wait))
    engine_end.add_done_callback(lambda _: stop.set())
    runner = web.AppRunner(
        Api(engine).application(), handler_cancellation=True, shutdown_timeout=SHUTDOWN_S
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        print(_ready_line(engine, runner.addresses[0]), flush=True)
        await stop.wait()
    except OSError as error:
        print(f"radixkv-worker: --listen {host}:{port}: {error.strerror}", file=sys.stderr)
        return 1
    finally:
        await runner.cleanup()
        await asyncio.to_thread(engine.stop)
        await engine_end
    if engine.failure is not None:
        print(f"radixkv-worker: the engine failed: {engine.failure}", file=sys.stderr)
    return 0 if engine.failure is None else 1


def _ready_line(engine: Engine, address: tuple[str, int]) -> str:
    loaded, hello = engine.loaded, engine.client.hello
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return (
        f"radixkv-worker {__version__} ready: http=http://{host}:{address[1]} "
        f"model={loaded.name} fingerprint={loaded.fingerprint} "
        f"dtype={str(loaded.model.dtype).removeprefix('torch.')} "
        f"block_size={hello.block_size} gpu_blocks={hello.num_blocks}"
    )


def _limits(options: argparse.Namespace) -> SchedulerLimits:
    return SchedulerLimits(
        token_budget=options.token_budget,
        max_running=options.max_running,
        prefix_wait_ms=options.prefix_wait_ms,
        room_wait_ms=options.room_wait_ms,
    )


def _parser() -> argparse.ArgumentParser:
    limits = SchedulerLimits()
    parser = argparse.ArgumentParser(prog="radixkv-worker", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"radixkv-worker {__version__}")
    parser.add_argument(
        "--model", required=True, help=f"safetensors directory, or {weights.SMOLLM2}"
    )
    parser.add_argument("--socket-dir", help="the server's; default as for radixkv-server")
    parser.add_argument("--transport", choices=("local", "grpc"), default="local")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--block-size", type=_positive, default=16, help="the server's")
    parser.add_argument(
        "--listen", type=_loopback, default=("127.0.0.1", 0), metavar="HOST:PORT",
        help="loopback only, for there is no authentication; port 0 takes a free one",
    )  # fmt: skip
    parser.add_argument("--threads", type=_positive, default=1, help="of torch")
    parser.add_argument(
        "--token-budget", type=_positive, default=limits.token_budget,
        help="tokens per step; longer prompts are computed in chunks",
    )  # fmt: skip
    parser.add_argument("--max-running", type=_positive, default=limits.max_running)
    parser.add_argument("--max-requests", type=_positive, default=256)
    parser.add_argument(
        "--prefix-wait-ms", type=_natural, default=limits.prefix_wait_ms,
        help="how long to wait for a prefix that another worker is computing",
    )  # fmt: skip
    parser.add_argument("--room-wait-ms", type=_positive, default=limits.room_wait_ms)
    return parser


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _natural(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def _loopback(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    host = host.strip("[]")
    if not separator or not port.isdecimal() or int(port) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    address = "127.0.0.1" if host == "localhost" else host
    try:
        loopback = ipaddress.ip_address(address).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise argparse.ArgumentTypeError(f"{host!r} is not a loopback address")
    return address, int(port)


if __name__ == "__main__":
    sys.exit(main())
