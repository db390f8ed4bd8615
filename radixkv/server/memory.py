"""How much host memory there is for a pool: the machine's, and that of each enclosing cgroup."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Left to the server itself (its index, buffers, other processes of the group).
HEADROOM_BYTES = 256 << 20
# A suggested number of blocks stays this far below what fits, so that it still fits a bit later.
SUGGESTION_MARGIN = 0.02


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """One bound: whose it is, its size, and what of it is unused or can be reclaimed."""

    owner: str
    limit_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a pool fits; `fitting_blocks` certainly do (0 = not even one)."""

    fits: bool
    fitting_blocks: int
    message: str


def check_fit(bound: MemoryBound, num_blocks: int, block_bytes: int, block_size: int) -> Fit:
    """Compare a pool of `num_blocks` + 1 blocks with what is available. Pure."""
    wanted = (num_blocks + 1) * block_bytes
    usable = max(0, bound.available_bytes - HEADROOM_BYTES)
    fitting = max(0, int(usable * (1 - SUGGESTION_MARGIN)) // block_bytes - 1)
    fitting = min(fitting, num_blocks)
    if wanted <= usable:
        return Fit(True, num_blocks, "")
    facts = (
        f"not enough host memory for the pool: {num_blocks} blocks of {block_bytes} bytes need "
        f"{format_bytes(wanted)}; {bound.owner} has {format_bytes(bound.available_bytes)} available"
        f" of {format_bytes(bound.limit_bytes)}, of which {format_bytes(HEADROOM_BYTES)} are kept "
        "for the server itself"
    )
    if fitting == 0:
        return Fit(False, 0, facts + "; not even one block fits: give it more memory")
    tokens = fitting * block_size
    return Fit(
        False, fitting, f"{facts}; {fitting} blocks ({tokens} tokens) fit: --gpu-blocks {fitting}"
    )


def format_bytes(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def tightest_bound(proc: Path = Path("/proc")) -> MemoryBound:
    """The bound with the least memory available, of the machine and every cgroup above us."""
    bounds = [_machine(proc / "meminfo"), *_cgroups(proc / "self")]
    return min(bounds, key=lambda bound: bound.available_bytes)


def _machine(meminfo: Path) -> MemoryBound:
    values = {}
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) * 1024
    total = values["MemTotal"]
    available = values.get("MemAvailable", values.get("MemFree", total))
    return MemoryBound("this machine", total, available)


def _cgroups(proc_self: Path) -> Iterator[MemoryBound]:
    """Bounds of our memory cgroup and its parents, under cgroup v1 and v2."""
    try:
        paths = _cgroup_paths((proc_self / "cgroup").read_text())
        mounts = _cgroup_mounts((proc_self / "mountinfo").read_text())
    except OSError:
        return
    for version, (root, mount_point) in mounts.items():
        if version not in paths:
            continue
        for directory in _walk_up(paths[version], root, mount_point):
            bound = _v1_bound(directory) if version == 1 else _v2_bound(directory)
            if bound is not None:
                yield bound


def _cgroup_paths(text: str) -> dict[int, str]:
    """Version -> path of our memory cgroup, of the lines "4:memory:/a/b" and "0::/a/b"."""
    paths = {}
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            paths[1] = path
        elif number == "0" and controllers == "":
            paths[2] = path
    return paths


def _cgroup_mounts(text: str) -> dict[int, tuple[str, Path]]:
    """Version -> (root within the hierarchy, mount point) of the memory hierarchies."""
    mounts = {}
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        root, mount_point = before.split()[3:5]
        kind, _, options = (after.split() + ["", "", ""])[:3]
        if kind == "cgroup" and "memory" in options.split(","):
            mounts[1] = (root, Path(mount_point))
        elif kind == "cgroup2":
            mounts[2] = (root, Path(mount_point))
    return mounts


def _walk_up(path: str, root: str, mount_point: Path) -> Iterator[Path]:
    """Existing directories from our cgroup up to the mount point.

    Inside a container the path may belong to the host's tree: then only the mount point is ours.
    """
    relative = path.removeprefix(root.rstrip("/")).lstrip("/")
    directory = mount_point / relative
    while directory != mount_point and mount_point in directory.parents:
        if ".." not in directory.parts and directory.is_dir():
            yield directory
        directory = directory.parent
    yield mount_point


def _v1_bound(directory: Path) -> MemoryBound | None:
    limit = _number(directory / "memory.limit_in_bytes")
    used = _number(directory / "memory.usage_in_bytes")
    return _bound(directory, limit, used, "total_inactive_file")


def _v2_bound(directory: Path) -> MemoryBound | None:
    limit = _number(directory / "memory.max")
    used = _number(directory / "memory.current")
    return _bound(directory, limit, used, "inactive_file")


def _bound(
    directory: Path, limit: int | None, used: int | None, reclaimable: str
) -> MemoryBound | None:
    if limit is None or used is None or limit >= 1 << 60:  # v1 writes "no limit" as a huge number
        return None
    free = limit - used + _stat(directory / "memory.stat", reclaimable)
    return MemoryBound(f"cgroup {directory}", limit, max(0, min(free, limit)))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent at the root; "max"
        return None


def _stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(key + " ")), 0)
