"""Files that have to agree with one another: generated code, README, Makefile, versions."""

import re
import subprocess
import sys
import tomllib

import radixkv
from tests.tidy.sources import GENERATED, PRODUCT, ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def shell_lines() -> list[str]:
    """Lines inside the fenced blocks of the documents, without prompts."""
    blocks = [
        block
        for document in DOCUMENTS
        for block in re.findall(r"^```\w*\n(.*?)^```", document.read_text(), re.M | re.S)
    ]
    return [line.removeprefix("$ ").strip() for block in blocks for line in block.splitlines()]


def test_generated_code_is_up_to_date(tmp_path):
    command = [sys.executable, ROOT / "tools" / "generate_proto.py", tmp_path]
    subprocess.run(command, check=True, timeout=60)
    fresh = {path.name: path.read_bytes() for path in (tmp_path / "radixkv/v1").iterdir()}
    there = {path.name: path.read_bytes() for path in GENERATED.glob("*_pb2*")}
    stale = [name for name in fresh | there if fresh.get(name) != there.get(name)]
    assert not stale, f"run `make proto` and commit: {stale}"


def test_make_targets_in_documents_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = [match for line in shell_lines() for match in re.findall(r"^make ([a-z-]+)", line)]
    assert {"demo", "test"} <= set(named), "README shows both"
    assert set(named) <= targets, set(named) - targets


def test_programs_in_documents_exist():
    named = {line.split()[0] for line in shell_lines() if re.match(r"radixkv(-[a-z]+)?( |$)", line)}
    assert named <= set(PROJECT["scripts"]), named


def test_links_in_documents_lead_somewhere():
    broken = [
        f"{document.name}: {target}"
        for document in DOCUMENTS
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
        if not (document.parent / target).exists()
    ]
    assert not broken, broken


def test_make_test_is_what_continuous_integration_runs():
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "exec make test"


def test_one_version():
    assert radixkv.__version__ == PROJECT["version"]


def test_every_package_is_found():
    folders = {path.parent for root in PRODUCT for path in (ROOT / root).rglob("*.py")}
    missing = [str(folder) for folder in folders if not (folder / "__init__.py").exists()]
    assert not missing, missing
