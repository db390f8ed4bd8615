"""The README's commands and code, run as it gives them."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server_process import ServerProcess

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
PROGRAMS = {
    "radixkv": "radixkv.cli.tool",
    "radixkv-server": "radixkv.cli.server",
    "radixkv-worker": "radixkv_worker.cli",
}


def blocks(language: str) -> list[str]:
    """The README's code blocks of this language ("" = none named)."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """Every line of a code block that calls one of our programs."""
    lines = [line for block in blocks("") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.split(" ")[0] in PROGRAMS]


def run(server: ServerProcess, *arguments: str) -> str:
    """Run Python against this server as the default one; its output."""
    environment = os.environ | {"RADIXKV_SOCKET_DIR": str(server.socket_dir)}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_code_for_an_engine_runs():
    (code,) = blocks("python")
    with ServerProcess("--check-invariants", gpu_blocks=256) as server:
        run(server, "-c", code)
        books = json.loads(run(server, "-m", PROGRAMS["radixkv"], "stats", "--json"))["books"]
        assert (books["cached"], books["leased"], books["free"]) == (1000 // 16, 0, 256 - 62)


def test_the_tool_is_called_as_the_readme_says():
    calls = [call for call in commands() if call[0] == "radixkv"]
    assert calls
    with ServerProcess() as server:
        for _, *arguments in calls:
            assert run(server, "-m", PROGRAMS["radixkv"], *arguments)


def test_the_server_starts_with_exactly_what_the_readme_says():
    calls = [call for call in commands() if call[0] == "radixkv-server" and "ready:" not in call]
    assert ["radixkv-server", "--gpu-blocks", "2000"] in calls
    (line,) = [call for call in commands() if "ready:" in call]
    with ServerProcess(gpu_blocks=2000) as server:
        names = [word.partition("=")[0] for word in line if "=" in word]
        assert list(server.ready) == names


@pytest.mark.parametrize("program", PROGRAMS)
def test_options_that_the_readme_names_exist(program: str):
    help_text = subprocess.run(
        [sys.executable, "-m", PROGRAMS[program], "--help"],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    for call in commands():
        if call[0] == program:
            for option in (word for word in call if word.startswith("--")):
                assert option in help_text, f"{program} has no {option}"
