"""Build hook: generates the gRPC stubs of protos/ into outrider/v1/ for editable installs and wheels alike."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent


def generate(root: Path = ROOT) -> None:
    """Compile every file of protos/outrider/v1 into root/outrider/v1, replacing what was there.

    Raises RuntimeError when the compiler refuses a file.
    """
    import grpc_tools
    from grpc_tools import protoc

    out = root / "outrider" / "v1"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / "__init__.py").write_text('"""The wire, generated from protos/outrider/v1."""\n')
    # The type plugin is a console script of the interpreter that builds, which need not be on PATH.
    plugin = Path(sys.executable).with_name("protoc-gen-mypy_grpc")
    found = str(plugin) if plugin.exists() else shutil.which("protoc-gen-mypy_grpc")
    arguments = [
        "protoc",
        f"-I{root / 'protos'}",
        f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
        f"--python_out={root}",
        f"--pyi_out={root}",
        f"--grpc_python_out={root}",
    ]
    if found:
        arguments += [f"--plugin=protoc-gen-mypy_grpc={found}", f"--mypy_grpc_out={root}"]
    arguments += [str(path) for path in sorted((root / "protos").rglob("*.proto"))]
    if status := protoc.main(arguments):
        raise RuntimeError(f"protoc failed with status {status}")


class StubBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate(Path(self.root))


if __name__ == "__main__":
    generate()
