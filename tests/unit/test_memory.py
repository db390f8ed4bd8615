"""H3: what memory there is, and what a refusal says."""

from pathlib import Path

import pytest

from radixkv.pools.layout import KVSpec
from radixkv.server.memory import (
    HEADROOM_BYTES,
    MemoryBound,
    check_fit,
    format_bytes,
    tightest_bound,
)
from radixkv.server.pool_host import PoolHost, PoolTooLarge, SpecMismatch

GIB = 1 << 30
MIB = 1 << 20
SPEC = KVSpec(2, 2, 64, 64, "float32", 16)


def fake_proc(tmp_path: Path, cgroup: str, mountinfo: str) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "self" / "mountinfo").write_text(mountinfo)
    return proc


def write(directory: Path, **values: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (directory / name.replace("__", ".")).write_text(f"{value}\n")


def v2(tmp_path: Path, path: str, root: str = "/") -> tuple[Path, Path]:
    mount = tmp_path / "cgroup"
    mount.mkdir(exist_ok=True)
    line = f"41 31 0:38 {root} {mount} rw,relatime shared:9 - cgroup2 cgroup rw\n"
    return fake_proc(tmp_path, f"0::{path}\n", line), mount


def test_machine_without_cgroups(tmp_path: Path) -> None:
    bound = tightest_bound(fake_proc(tmp_path, "", ""))
    assert bound == MemoryBound("this machine", 16 * GIB, 8 * GIB)


def test_v2_limit_of_a_parent_counts(tmp_path: Path) -> None:
    proc, mount = v2(tmp_path, "/a/b")
    write(mount / "a", memory__max=2 * GIB, memory__current=GIB, memory__stat="inactive_file 100")
    write(mount / "a" / "b", memory__max="max", memory__current=5)
    bound = tightest_bound(proc)
    assert bound == MemoryBound(f"cgroup {mount}/a", 2 * GIB, GIB + 100)


def test_v2_inside_a_container_the_mount_is_ours(tmp_path: Path) -> None:
    proc, mount = v2(tmp_path, "/../../elsewhere")
    write(mount, memory__max=GIB, memory__current=0)
    assert tightest_bound(proc).available_bytes == GIB


def test_v2_mount_of_a_subtree(tmp_path: Path) -> None:
    proc, mount = v2(tmp_path, "/docker/1/x", root="/docker/1")
    write(mount / "x", memory__max=GIB, memory__current=0)
    assert tightest_bound(proc).owner.endswith("/x")


def test_v1_limit(tmp_path: Path) -> None:
    mount = tmp_path / "memory"
    line = f"35 31 0:32 / {mount} rw - cgroup cgroup rw,memory\n"
    proc = fake_proc(tmp_path, "4:memory:/job\n0::/\n", line)
    stat = "cache 5\ntotal_inactive_file 7"
    write(
        mount / "job",
        memory__limit_in_bytes=GIB,
        memory__usage_in_bytes=GIB // 2,
        memory__stat=stat,
    )
    write(mount, memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=1)
    assert tightest_bound(proc) == MemoryBound(f"cgroup {mount}/job", GIB, GIB // 2 + 7)


def test_usage_above_the_limit_is_no_negative_memory(tmp_path: Path) -> None:
    proc, mount = v2(tmp_path, "/")
    write(mount, memory__max=GIB, memory__current=2 * GIB)
    assert tightest_bound(proc).available_bytes == 0


def test_this_machine_can_be_read() -> None:
    bound = tightest_bound()
    assert 0 < bound.available_bytes <= bound.limit_bytes


def test_h3_refusal_names_everything_and_its_suggestion_works() -> None:
    bound = MemoryBound("cgroup /x", 4 * GIB, GIB)
    fit = check_fit(bound, 1000, MIB, 16)
    assert not fit.fits
    for part in ("host memory", "1001.0 MiB", "cgroup /x", "1.0 GiB", "4.0 GiB", "--gpu-blocks"):
        assert part in fit.message, part
    assert f"{fit.fitting_blocks} blocks ({fit.fitting_blocks * 16} tokens)" in fit.message
    assert check_fit(bound, fit.fitting_blocks, MIB, 16).fits
    later = MemoryBound("cgroup /x", 4 * GIB, GIB - 10 * MIB)
    assert check_fit(later, fit.fitting_blocks, MIB, 16).fits


def test_h3_not_even_one_block() -> None:
    fit = check_fit(MemoryBound("this machine", GIB, HEADROOM_BYTES + 5), 10, MIB, 16)
    assert (fit.fits, fit.fitting_blocks) == (False, 0)
    assert "not even one block" in fit.message


@pytest.mark.parametrize(
    ("count", "text"), [(5, "5 bytes"), (1536, "1.5 KiB"), (3 * GIB, "3.0 GiB"), (1 << 50, "1024")]
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count).startswith(text)


def test_pool_host_refuses_with_the_number_that_fits_and_then_takes_it() -> None:
    bound = MemoryBound("this machine", GIB, HEADROOM_BYTES + 10 * MIB)
    with pytest.raises(PoolTooLarge, match="--gpu-blocks") as caught:
        PoolHost(100_000, 16, memory=lambda: bound).fix_spec(SPEC)
    fitting = caught.value.fitting_blocks
    assert 0 < fitting < 100_000
    host = PoolHost(fitting, 16, memory=lambda: bound)
    arena = host.fix_spec(SPEC)
    arena.ensure(fitting)
    host.close()


def test_pool_host_shares_a_pool_between_specs_of_equal_block_bytes() -> None:
    host = PoolHost(4, 16)
    assert host.block_bytes == 0
    arena = host.fix_spec(SPEC)
    assert host.fix_spec(KVSpec(4, 1, 64, 64, "float32", 16)) is arena
    assert host.block_bytes == SPEC.block_bytes
    with pytest.raises(SpecMismatch, match=r"kv_spec.num_layers is 3, not 2"):
        host.fix_spec(KVSpec(3, 2, 64, 64, "float32", 16))
    with pytest.raises(SpecMismatch, match=r"kv_spec.block_size is 32.*--block-size 32"):
        host.fix_spec(KVSpec(2, 2, 64, 64, "float32", 32))
    assert host.spec == SPEC
    host.close()
    host.close()
