"""Packs between real servers: exported, the server started anew, imported, the same bytes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import xxhash

from radixkv_client import Client, FailedPrecondition, NotFound, Scope, TooLarge
from radixkv_client.pack import export_pack, import_pack
from radixkv_client.pack_format import PackError, PackFile
from radixkv_client.tools import Tools
from tests.client_rig import SPEC, B, check_idle, check_kv, write_kv
from tests.server_process import ServerProcess, clean_environment

SYSTEM = list(range(100, 100 + 3 * B))
PROMPTS = [SYSTEM + [number] * (2 * B + 1) for number in range(1, 4)]
TENANT = Scope(salt="tenant")


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    options = ["--check-invariants", "--block-size", str(B)]
    with ServerProcess(*options, gpu_blocks=32) as server:
        yield server


def connect(server: ServerProcess, model: str = "tiny") -> Client:
    return Client.connect(server.socket_dir, model=model, kv_spec=SPEC)


def compute(server: ServerProcess, prompts: Sequence[list[int]], scope: Scope | None) -> None:
    """A worker serves some prompts and leaves."""
    with connect(server) as client:
        for prompt in prompts:
            with client.acquire(prompt, scope=scope) as lease:
                write_kv(client, lease, prompt, lease.cached_tokens)
                lease.commit(len(prompt))


def cached_right(server: ServerProcess, prompt: list[int], scope: Scope | None = None) -> int:
    """How many tokens a worker finds; their KV must be right."""
    with connect(server) as client, client.acquire(prompt, scope=scope) as lease:
        check_kv(client, lease, prompt, lease.cached_tokens)
        return lease.cached_tokens


def cached_blocks(server: ServerProcess) -> int:
    with Tools(server.grpc_target) as tools:
        cached: int = tools.stats().books.cached
        return cached


def make_pack(server: ServerProcess, path: Path, scope: Scope | None = None) -> None:
    """A pack of all prompts: 9 blocks, 3 of which all share."""
    compute(server, PROMPTS, scope)
    summary = export_pack(path, PROMPTS, socket_dir=server.socket_dir, scope=scope)
    assert (summary.num_tokens, summary.written_blocks) == (3 * 5 * B, 3 + 3 * 2)


@pytest.mark.parametrize("scope", [None, TENANT, Scope("ada", "2", "tenant")])
def test_a_restarted_server_is_warm_after_an_import(
    server: ServerProcess, tmp_path: Path, scope: Scope | None
) -> None:
    pack = tmp_path / "pack"
    make_pack(server, pack, scope)
    assert pack.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["pack"]
    server.restart()
    assert cached_blocks(server) == 0
    summary = import_pack(pack, socket_dir=server.socket_dir)
    assert summary.written_blocks == 9
    for prompt in PROMPTS:
        assert cached_right(server, prompt, scope) == 5 * B
    others = [other for other in (None, TENANT, Scope(salt="other")) if other != scope]
    assert {cached_right(server, PROMPTS[0], other) for other in others} == {0}
    with connect(server) as client:
        check_idle(client)
        queried = client.stats().counters.queried_tokens
        assert queried == (3 + len(others)) * len(PROMPTS[0]), "an import is nobody's request"


def test_what_is_cached_already_is_left_as_it_is(server: ServerProcess, tmp_path: Path) -> None:
    make_pack(server, tmp_path / "pack")
    assert import_pack(tmp_path / "pack", socket_dir=server.socket_dir).written_blocks == 0
    server.restart()
    compute(server, PROMPTS[:1], None)
    assert import_pack(tmp_path / "pack", socket_dir=server.socket_dir).written_blocks == 4
    assert cached_blocks(server) == 9
    assert [cached_right(server, prompt) for prompt in PROMPTS] == [5 * B] * 3


def test_only_what_is_cached_is_exported(server: ServerProcess, tmp_path: Path) -> None:
    compute(server, PROMPTS[:1], None)
    longer = PROMPTS[0][:-1] + [7] * (4 * B)
    summary = export_pack(
        tmp_path / "pack", [longer, PROMPTS[1], SYSTEM, [9] * B], socket_dir=server.socket_dir
    )
    with PackFile(tmp_path / "pack") as pack:
        assert [pack.header.num_blocks(sequence) for sequence in pack.header.sequences] == [5]
    assert (summary.num_tokens, summary.asked_tokens) == (5 * B, 9 * B + 5 * B + B)
    with pytest.raises(PackError, match="none of these 1 prefixes is cached"):
        export_pack(tmp_path / "other", [[9] * B], socket_dir=server.socket_dir)
    with pytest.raises(NotFound, match="nothing is cached in this namespace"):
        export_pack(tmp_path / "other", PROMPTS, socket_dir=server.socket_dir, scope=TENANT)
    assert os.listdir(tmp_path) == ["pack"]
    with connect(server) as client:
        check_idle(client)


def test_an_export_keeps_nobody_waiting(server: ServerProcess, tmp_path: Path) -> None:
    """It asks for a prompt that is cached in part only; nobody shall wait for it to compute."""
    with connect(server) as client:
        longer = PROMPTS[0] + [7] * (4 * B)
        compute(server, PROMPTS[:1], None)
        export_pack(tmp_path / "pack", [longer], socket_dir=server.socket_dir)
        with client.acquire(longer, wait_ms=20_000) as lease:
            assert (lease.waited_ms, lease.being_computed) == (0, 0)


def damaged(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Packs that must not be imported."""
    for at in (13, 50, len(data) - 1, len(data) - 8 * SPEC.block_bytes):
        yield f"bit of byte {at}", data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    for size in (0, 20, 100, len(data) - 1, len(data) - SPEC.block_bytes):
        yield f"cut to {size}", data[:size]
    yield "longer", data + b"x"
    yield "two blocks swapped", (
        data[: -2 * SPEC.block_bytes] + data[-SPEC.block_bytes :]
        + data[-2 * SPEC.block_bytes : -SPEC.block_bytes]
    )  # fmt: skip


def test_of_a_damaged_pack_nothing_is_published(server: ServerProcess, tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    make_pack(server, pack)
    data = pack.read_bytes()
    server.restart()
    for what, broken in damaged(data):
        pack.write_bytes(broken)
        with pytest.raises(PackError, match="damaged|cut short|not a radixkv|the file has"):
            import_pack(pack, socket_dir=server.socket_dir)
        assert cached_blocks(server) == 0, what


def test_a_block_damaged_behind_the_first_reading_is_not_published(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = tmp_path / "pack"
    make_pack(server, pack)
    server.restart()
    check_blocks = PackFile.check_blocks

    def damage_then(self: PackFile) -> None:
        check_blocks(self)
        with open(pack, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"!")

    monkeypatch.setattr(PackFile, "check_blocks", damage_then)
    with pytest.raises(PackError, match="block 8 of the file is damaged"):
        import_pack(pack, socket_dir=server.socket_dir)
    assert [cached_right(server, prompt) for prompt in PROMPTS[:2]] == [5 * B] * 2
    assert cached_right(server, PROMPTS[2]) == 3 * B, "nothing of the sequence with it"
    with connect(server) as client:
        check_idle(client)


def test_a_pack_of_another_layout_is_refused_by_field(
    server: ServerProcess, tmp_path: Path
) -> None:
    pack = tmp_path / "pack"
    make_pack(server, pack)
    with ServerProcess("--block-size", "8") as other:
        with pytest.raises(FailedPrecondition, match="block_size is 4, the server's is 8"):
            import_pack(pack, socket_dir=other.socket_dir)
        assert cached_blocks(other) == 0
    with ServerProcess("--block-size", "4", "--kv-spec", "smollm2-135m") as other:
        with pytest.raises(FailedPrecondition, match="kv_spec.num_layers"):
            import_pack(pack, socket_dir=other.socket_dir)
        assert cached_blocks(other) == 0


def test_a_pack_that_cannot_fit_says_so(server: ServerProcess, tmp_path: Path) -> None:
    make_pack(server, tmp_path / "pack")
    with (
        ServerProcess("--block-size", str(B), gpu_blocks=4) as small,
        pytest.raises(TooLarge, match="6 blocks"),
    ):
        import_pack(tmp_path / "pack", socket_dir=small.socket_dir)


def test_several_models_have_to_be_named(server: ServerProcess, tmp_path: Path) -> None:
    compute(server, PROMPTS, None)
    with connect(server, "other") as client, client.acquire(PROMPTS[0]) as lease:
        lease.commit(len(PROMPTS[0]))
    with pytest.raises(PackError, match="2 models"):
        export_pack(tmp_path / "pack", PROMPTS, socket_dir=server.socket_dir)
    made = export_pack(tmp_path / "pack", PROMPTS, socket_dir=server.socket_dir, model="other")
    assert (made.header.model, made.written_blocks) == ("other", 5)


# ---- the tool -------------------------------------------------------------------------------


def tool(server: ServerProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(server, *arguments), capture_output=True, text=True, timeout=30,
        env=clean_environment(),
    )  # fmt: skip


def command(server: ServerProcess, *arguments: str) -> list[str]:
    place = ["--socket-dir", str(server.socket_dir)]
    return [sys.executable, "-m", "radixkv.cli.tool", *arguments, *place]


def test_the_tool_exports_and_imports(server: ServerProcess, tmp_path: Path) -> None:
    compute(server, PROMPTS, TENANT)
    file, pack = tmp_path / "tokens", str(tmp_path / "pack")
    file.write_bytes(b"".join(token.to_bytes(4, "little") for token in PROMPTS[0]))
    prefixes = ["--prefix", f"@{file}", "--prefix", ",".join(map(str, PROMPTS[1]))]
    absent = tool(server, "pack", "export", *prefixes, pack)
    assert absent.returncode == 1 and "nothing is cached in this namespace" in absent.stderr
    done = tool(server, "pack", "export", *prefixes, "--salt", "tenant", pack)
    assert "wrote 2 prefixes, 40 of 40 tokens, of model tiny: 7 blocks" in done.stdout, done.stderr
    server.restart()
    done = tool(server, "pack", "import", pack, "--json")
    assert json.loads(done.stdout)["written_blocks"] == 7, done.stderr
    assert cached_right(server, PROMPTS[1], TENANT) == 5 * B
    (tmp_path / "other").write_bytes(b"no pack")
    for path, words in ((tmp_path / "other", "not a radixkv pack"), (tmp_path / "no", "No such")):
        refused = tool(server, "pack", "import", str(path))
        assert refused.returncode == 1 and refused.stderr.count("\n") == 1
        assert f"cannot import {path}" in refused.stderr and words in refused.stderr
    over_tcp = tool(server, "pack", "import", pack, "--address", server.tools_target)
    assert "needs the server's sockets" in over_tcp.stderr


def test_an_import_that_is_killed_leaves_nothing_behind(
    server: ServerProcess, tmp_path: Path
) -> None:
    make_pack(server, tmp_path / "pack")
    server.restart()
    before = xxhash.xxh3_64_intdigest((tmp_path / "pack").read_bytes())
    for delay_s in (0.3, 0.4, 0.5):
        process = subprocess.Popen(command(server, "pack", "import", str(tmp_path / "pack")))
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    with connect(server) as client:
        deadline = time.monotonic() + 10
        while client.stats().num_sessions > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        check_idle(client)
    assert import_pack(tmp_path / "pack", socket_dir=server.socket_dir).num_tokens == 15 * B
    assert [cached_right(server, prompt) for prompt in PROMPTS] == [5 * B] * 3
    assert xxhash.xxh3_64_intdigest((tmp_path / "pack").read_bytes()) == before
