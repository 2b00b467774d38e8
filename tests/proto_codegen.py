"""Generates the Python beside the protocol's .proto files.

python -m tests.proto_codegen proto     writes it (this is `make proto`)
python -m tests.proto_codegen check     lists the files that have drifted, and fails if there are any
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

PROTO_ROOT = Path(__file__).resolve().parents[1] / "proto"
PACKAGES = (Path("stageline_rpc/v1"), Path("stageline_rpc/internal/v1"))
"""The public and the internal protocol."""
GENERATED_PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def generate(output: Path, *, root: Path = PROTO_ROOT) -> None:
    """Writes the generated files of every .proto under `root` to the same place under `output`."""
    sources = sorted(source for package in PACKAGES for source in (root / package).glob("*.proto"))
    _protoc(root, sources, f"--python_out={output}", f"--mypy_out=quiet:{output}")
    with_services = [source for source in sources if "\nservice " in source.read_text()]
    _protoc(root, with_services, f"--grpc_python_out={output}", f"--mypy_grpc_out=only_async,quiet:{output}")


def drifted(*, root: Path = PROTO_ROOT) -> list[str]:
    """The committed files under `root` that differ from what its .proto files give, are missing, or are left
    over; paths relative to `root`.
    """
    with TemporaryDirectory() as directory:
        fresh_root = Path(directory)
        generate(fresh_root, root=root)
        committed, fresh = _contents(root), _contents(fresh_root)
    return sorted(name for name in committed.keys() | fresh.keys() if committed.get(name) != fresh.get(name))


def drift_message(names: Iterable[str]) -> str:
    """The advice after a change of one without the other."""
    return f"generated code has drifted from the .proto files; run `make proto`: {', '.join(names)}"


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 1 for drift, 2 for arguments that make no sense."""
    if list(arguments) == ["proto"]:
        generate(PROTO_ROOT)
        return 0
    if list(arguments) == ["check"]:
        names = drifted()
        if names:
            print(drift_message(names), file=sys.stderr)
        return 1 if names else 0
    print("usage: python -m tests.proto_codegen proto|check", file=sys.stderr)
    return 2


def _protoc(root: Path, sources: Sequence[Path], *outputs: str) -> None:
    scripts = Path(sysconfig.get_path("scripts"))
    plugins = [
        f"--plugin={name}={scripts / name}{'.exe' if sys.platform == 'win32' else ''}"
        for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
    ]
    names = [str(source.relative_to(root)) for source in sources]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{root}", *plugins, *outputs, *names]
    subprocess.run(command, check=True, cwd=root, timeout=120)


def _contents(root: Path) -> dict[str, bytes]:
    folders = (root / package for package in PACKAGES)
    files = (file for folder in folders for pattern in GENERATED_PATTERNS for file in folder.glob(pattern))
    return {str(file.relative_to(root)): file.read_bytes() for file in files}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
