"""Generates radixkv/v1 from proto/ below a directory: `python tools/generate_proto.py DIR`."""

import sys
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(target: Path) -> None:
    """Write radixkv/v1/*_pb2.py, *_pb2.pyi and *_pb2_grpc.py below `target`."""
    sources = sorted((ROOT / "proto").rglob("*.proto"))
    includes = [ROOT / "proto", Path(grpc_tools.__file__).parent / "_proto"]
    outputs = ["--python_out", "--pyi_out", "--grpc_python_out"]
    code = protoc.main(
        ["protoc"]
        + [f"-I{path}" for path in includes]
        + [f"{output}={target}" for output in outputs]
        + [str(source.relative_to(ROOT / "proto")) for source in sources]
    )
    if code != 0:
        raise SystemExit(f"protoc failed with status {code}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
