"""Who may import what, beyond the layers that import-linter checks."""

import subprocess
import sys

import pytest

from tests.tidy.sources import ROOT, imported_modules, sources

PURE_CORE_MAY_IMPORT = {"radixkv.core", "numpy", "sortedcontainers", "xxhash"}
IMPURE_STDLIB = {
    "asyncio", "concurrent", "ctypes", "io", "logging", "mmap", "multiprocessing", "os", "pathlib",
    "queue", "random", "secrets", "select", "selectors", "shutil", "signal", "socket", "subprocess",
    "sys", "tempfile", "threading", "time", "uuid",
}  # fmt: skip


def belongs_to(module: str, owners: set[str]) -> bool:
    return any(module == owner or module.startswith(owner + ".") for owner in owners)


def is_stdlib(module: str) -> bool:
    return module.split(".")[0] in sys.stdlib_module_names


def test_the_core_is_pure():
    wrong = [
        f"{source.at(node)} {module}"
        for source in sources("radixkv/core")
        for module, node in imported_modules(source)
        if belongs_to(module, IMPURE_STDLIB)
        or not (is_stdlib(module) or belongs_to(module, PURE_CORE_MAY_IMPORT))
    ]
    assert not wrong, f"the core does no I/O and knows no clock: {wrong}"


def test_kernels_import_only_torch_and_triton():
    wrong = [
        f"{source.at(node)} {module}"
        for source in sources("kernels")
        for module, node in imported_modules(source)
        if not (is_stdlib(module) or belongs_to(module, {"torch", "triton", "radixkv_kernels"}))
    ]
    assert not wrong, wrong


def test_the_client_knows_only_the_wire():
    wrong = [
        f"{source.at(node)} {module}"
        for source in sources("clients/radixkv_client")
        for module, node in imported_modules(source)
        if belongs_to(module, {"radixkv"})
        and not belongs_to(module, {"radixkv.v1", "radixkv.wire"})
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("module", ["radixkv_client", "radixkv.cli.server", "radixkv.cli.tool"])
def test_importing_does_not_import_torch(module):
    assert not loaded_by(f"import {module}", {"torch", "triton"})


def test_the_core_loads_nothing_heavy():
    modules = [
        str(source.path.relative_to(ROOT).with_suffix("")).replace("/", ".")
        for source in sources("radixkv/core")
    ]
    heavy = {"torch", "triton", "grpc", "asyncio", "aiohttp", "google.protobuf"}
    assert not loaded_by(f"import {', '.join(modules)}", heavy)


def loaded_by(statement: str, suspects: set[str]) -> list[str]:
    """Which of `suspects` a fresh interpreter has loaded after `statement`."""
    code = f"import sys\n{statement}\nprint(*sorted({suspects!r} & sys.modules.keys()))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
