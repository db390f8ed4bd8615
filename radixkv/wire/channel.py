"""gRPC settings of both ends, and the environment both ends' processes need, in one place.

The defaults of gRPC do not fit: 4 MiB messages, a second server that silently takes a share of the
first one's connections, and a frozen peer that is never found out.
"""

import os
from collections.abc import MutableMapping

from radixkv.wire.limits import MAX_MESSAGE_BYTES

ChannelOptions = list[tuple[str, int]]

MAX_CONCURRENT_STREAMS = 1024  # of one connection
CLIENT_PING_INTERVAL_MS = 5_000
SERVER_PING_INTERVAL_MS = 30_000
PING_TIMEOUT_MS = 5_000
MIN_PING_INTERVAL_MS = 1_000  # what the server puts up with
RECONNECT_BACKOFF_MS = 100
MAX_RECONNECT_BACKOFF_MS = 1_000
CONNECT_TIMEOUT_MS = 1_000

# Read when the process starts (malloc) or when grpc is imported (experiments). The thresholds keep
# buffers of large messages mapped: messages of 128k tokens pass 4 times as fast.
MALLOC_ENVIRONMENT = {
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
}
GRPC_ENVIRONMENT = {
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
}
PROCESS_ENVIRONMENT = MALLOC_ENVIRONMENT | GRPC_ENVIRONMENT


def server_options() -> ChannelOptions:
    """Options for `grpc.server` and `grpc.aio.server`."""
    return [
        *_MESSAGE_SIZES,
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
        ("grpc.keepalive_time_ms", SERVER_PING_INTERVAL_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def client_options() -> ChannelOptions:
    """Options for `grpc.insecure_channel` and `grpc.aio.insecure_channel`."""
    return [
        *_MESSAGE_SIZES,
        ("grpc.keepalive_time_ms", CLIENT_PING_INTERVAL_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_BACKOFF_MS),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]


def missing_environment(environ: MutableMapping[str, str] | None = None) -> dict[str, str]:
    """Settings of PROCESS_ENVIRONMENT that `environ` (default: this process's) says nothing about.

    A process that finds some missing starts itself anew with them before it imports grpc.
    """
    present = os.environ if environ is None else environ
    return {name: value for name, value in PROCESS_ENVIRONMENT.items() if name not in present}


_MESSAGE_SIZES: ChannelOptions = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
