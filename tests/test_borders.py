"""Which package may import which. Lower packages know nothing of those above, and only some of them need torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"outrider", "gateway", "drafter_service", "verifier_service", "engine", "kernels", "models", "benchmarks"}
# By folder, what of ours it may import beside itself and the generated stubs.
MAY_IMPORT = {
    "kernels": set[str](),
    "outrider/protocol": set[str](),
    "outrider/service": {"outrider/protocol"},
    "engine": {"kernels", "outrider/protocol"},
    "gateway": {"outrider/protocol", "outrider/service", "outrider"},
    "verifier_service": {"engine", "kernels", "outrider/protocol", "outrider/service"},
    "drafter_service": {"engine", "kernels", "outrider/protocol", "outrider/service"},
}
# What clients, gateways, drafters without a model and whoever asks for help import; torch takes seconds and gigabytes.
WITHOUT_TORCH = (
    "outrider",
    "outrider.client",
    "outrider.cli",
    "gateway.gateway",
    "drafter_service.__main__",
    "drafter_service.ngram_drafter",
    "verifier_service.__main__",
)


def imported_by(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # The name may be a module itself.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def folder_of(module: str) -> str:
    first, *rest = module.split(".")
    return f"{first}/{rest[0]}" if first == "outrider" and rest and (ROOT / first / rest[0]).is_dir() else first


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_packages_import_only_what_lies_below_them(folder: str) -> None:
    """Catches a model that knows of requests, a kernel that knows of models, and a chassis that knows of either."""
    allowed = MAY_IMPORT[folder] | {folder, "outrider/v1"}
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    strangers = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in files
        for module in imported_by(path)
        if module.split(".")[0] in OURS and folder_of(module) not in allowed
    }
    assert not strangers


def test_no_torch_where_there_is_no_model() -> None:
    program = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    if 'torch' in sys.modules:
        sys.exit(f"{module} imports torch")
"""
    run = subprocess.run([sys.executable, "-c", program, *WITHOUT_TORCH], cwd=ROOT, capture_output=True, check=False)
    assert (run.returncode, run.stderr) == (0, b"")


@pytest.mark.parametrize("folder", ["outrider/protocol", "outrider/service", "gateway"])
def test_no_torch_in(folder: str) -> None:
    """Catches what the test above would only see where the module is imported."""
    for path in (ROOT / folder).rglob("*.py"):
        assert not {module for module in imported_by(path) if module.split(".")[0] in ("torch", "triton")}, path
