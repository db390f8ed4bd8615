"""Cases A2 and A6 end to end: what one process commits, another one finds, and only that."""

import os
import subprocess
import sys

import pytest

from tests.server_process import ServerProcess

TIMEOUT_S = 60
WORKER = """
import sys
from radixkv_client import Client, KVSpec, Scope
socket_dir, action, adapter, version = sys.argv[1:]
spec = KVSpec(1, 1, 4, 4, "int8", block_size=4)
scope = Scope(adapter=adapter, adapter_version=version)
with Client.connect(socket_dir, model="m", kv_spec=spec) as client:
    with client.acquire(list(range(17)), scope=scope) as lease:
        print(lease.cached_tokens)
        if action == "commit":
            lease.commit(17)
"""


@pytest.fixture
def server():
    with ServerProcess("--block-size", "4", "--check-invariants", gpu_blocks=64) as process:
        yield process


def run(server: ServerProcess, action: str, seed: str, adapter: str = "", version: str = "") -> int:
    """Run a worker process with its own hash seed; returns the tokens it found cached."""
    command = [sys.executable, "-c", WORKER, str(server.socket_dir), action, adapter, version]
    env = os.environ | {"PYTHONHASHSEED": seed}
    return int(subprocess.check_output(command, env=env, timeout=TIMEOUT_S))


def test_a6_another_interpreter_hits(server: ServerProcess) -> None:
    assert run(server, "commit", "0") == 0
    for seed in ("0", "1", "random"):
        assert run(server, "look", seed) == 16


def test_a2_adapters_of_other_processes_are_kept_apart(server: ServerProcess) -> None:
    assert run(server, "commit", "0", "x", "1") == 0
    for adapter, version in (("", ""), ("x", "2"), ("y", "1")):
        assert run(server, "look", "1", adapter, version) == 0
    assert run(server, "look", "1", "x", "1") == 16
