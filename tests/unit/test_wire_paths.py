"""Socket paths: the documented defaults, and a directory nobody else can write to."""

import os
import stat
from pathlib import Path

import pytest

from radixkv.wire import paths


def test_the_default_directory_is_the_first_that_is_set():
    both = {"RADIXKV_SOCKET_DIR": "/a/b", "XDG_RUNTIME_DIR": "/run/user/7"}
    assert paths.default_socket_dir(both) == Path("/a/b")
    del both["RADIXKV_SOCKET_DIR"]
    assert paths.default_socket_dir(both) == Path("/run/user/7/radixkv")
    assert paths.default_socket_dir({}) == Path(f"/tmp/radixkv-{os.getuid()}")


def test_names_inside_the_directory():
    found = paths.SocketPaths(Path("/run/radixkv"))
    assert found.attach == Path("/run/radixkv/attach.sock")
    assert found.grpc_target == "unix:/run/radixkv/grpc.sock"
    assert found.lock == Path("/run/radixkv/lock")


def test_a_path_too_long_for_a_socket_says_what_to_change():
    with pytest.raises(ValueError, match="--socket-dir"):
        paths.SocketPaths(Path("/" + "x" * 100))


def test_a_new_directory_is_private(tmp_path):
    directory = tmp_path / "run" / "radixkv"
    paths.make_private_directory(directory)
    paths.make_private_directory(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_directory_others_can_write_to_is_refused(tmp_path):
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(PermissionError, match="chmod 700"):
        paths.make_private_directory(directory)


def test_a_link_in_the_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError):
        paths.make_private_directory(tmp_path / "link")
