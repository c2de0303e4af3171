"""Build hook: generates the gRPC stubs of protos/ into outrider/v1/ for editable installs and wheels alike."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent


def generate(root: Path = ROOT) -> None:
    """Compile every file of protos/outrider/v1 into root/outrider/v1, replacing what was there.

    Raises RuntimeError when the compiler refuses a file.
    """
    out = root / "outrider" / "v1"
    with tempfile.TemporaryDirectory(dir=root / "outrider", prefix=".v1-") as directory:
        fresh = Path(directory)
        _compile(root / "protos", fresh)
        package = fresh / "outrider" / "v1"
        (package / "__init__.py").write_text('"""The wire, generated from protos/outrider/v1."""\n')
        out.mkdir(exist_ok=True)
        # File by file, so that a program that imports the stubs meanwhile finds either the old or the new one.
        names = {path.name for path in package.iterdir()}
        for path in package.iterdir():
            path.replace(out / path.name)
        for path in out.iterdir():
            if path.is_file() and path.name not in names:
                path.unlink()


def _compile(protos: Path, out: Path) -> None:
    import grpc_tools
    from grpc_tools import protoc

    # The type plugin is a console script of the interpreter that builds, which need not be on PATH.
    plugin = Path(sys.executable).with_name("protoc-gen-mypy_grpc")
    found = str(plugin) if plugin.exists() else shutil.which("protoc-gen-mypy_grpc")
    arguments = [
        "protoc",
        f"-I{protos}",
        f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
    ]
    if found:
        arguments += [f"--plugin=protoc-gen-mypy_grpc={found}", f"--mypy_grpc_out={out}"]
    arguments += [str(path) for path in sorted(protos.rglob("*.proto"))]
    if status := protoc.main(arguments):
        raise RuntimeError(f"protoc failed with status {status}")


class StubBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs before the wheel, the editable install and the sdist are put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate the stubs; put the bundled models into a wheel (an editable install finds them in the checkout)."""
        generate(Path(self.root))
        if self.target_name == "wheel" and version == "standard":
            build_data["force_include"]["models/demo"] = "outrider/models/demo"


if __name__ == "__main__":
    generate()
