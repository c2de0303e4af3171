"""Two checkouts of this repository on one machine, each of which must run its own code and nothing of the other's."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_STUBS = Path("outrider/v1")
_PROTOS = Path("protos/outrider/v1")
_FIND = """
import importlib.util, json, sys
specs = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}
print(json.dumps({name: spec and spec.origin for name, spec in specs.items()}))
"""


class CheckoutError(Exception):
    """A checkout cannot be made or used; the message says why."""


@dataclass(frozen=True)
class Checkout:
    """A working tree, complete with its stubs."""

    name: str
    path: Path
    programs: Path | None = None  # where `benchmarks` is taken from; None: from the checkout itself

    @property
    def directory(self) -> Path:
        """Where a child process has to be started, for `python -m` to find the right `benchmarks`."""
        return self.programs or self.path

    def environment(self) -> dict[str, str]:
        """Environment variables with which a child process finds this checkout's packages before all others."""
        paths = [str(self.directory), str(self.path), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def modules(self) -> dict[str, str]:
        """Where its packages are found, by a program started here and by the services that such a program starts.

        Raises CheckoutError where one of them is another checkout's.
        """
        packages = sorted(path.parent.name for path in self.path.glob("*/__init__.py") if path.parent.name != "tests")
        names = [*packages, "outrider.v1.common_pb2"]
        found: dict[str, str] = {}
        # A service is started with -P, which leaves the current directory out.
        for flags in ([], ["-P"]):
            command = [sys.executable, *flags, "-c", _FIND, *names]
            output = subprocess.run(
                command, check=False, cwd=self.directory, env=self.environment(), capture_output=True, text=True
            )
            if output.returncode:
                raise CheckoutError(f"{self.name}: no module can be found: {output.stderr.strip()[-500:]}")
            found = json.loads(output.stdout)
            for name, origin in found.items():
                root = (self.directory if name == "benchmarks" else self.path).resolve()
                if origin is None or not Path(origin).resolve().is_relative_to(root):
                    raise CheckoutError(f"{self.name}: {name} comes from {origin}, not from {root}")
        return found


def export(revision: str, directory: Path, *, repository: Path = ROOT) -> str:
    """Write a revision's files to a directory; its full name. Raises CheckoutError where git does not know it."""
    try:
        name = _git(repository, "rev-parse", "--verify", f"{revision}^{{commit}}").decode().strip()
        archive = directory / ".archive.tar"
        archive.write_bytes(_git(repository, "archive", "--format=tar", name))
    except (OSError, subprocess.CalledProcessError) as error:
        detail = error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        raise CheckoutError(f"git cannot give revision {revision}, name a checkout by --base-dir: {detail}") from error
    with tarfile.open(archive) as files:
        files.extractall(directory, filter="data")
    archive.unlink()
    return name


def describe(directory: Path) -> str | None:
    """The revision of a working tree, with -dirty where files differ from it; None where git cannot tell."""
    try:
        if Path(_git(directory, "rev-parse", "--show-toplevel").decode().strip()).resolve() != directory.resolve():
            return None
        return _git(directory, "describe", "--always", "--dirty", "--abbrev=12").decode().strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def ensure_stubs(checkout: Path, *, like: Path = ROOT) -> str:
    """Give a checkout its generated stubs where it has none; how. Raises CheckoutError where that fails.

    They are copied from `like` where the protos are the same to the byte, else compiled.
    """
    stubs = checkout / _STUBS
    if (stubs / "common_pb2.py").exists():
        return "there already"
    if (like / _STUBS / "common_pb2.py").exists() and _same_files(checkout / _PROTOS, like / _PROTOS):
        shutil.copytree(like / _STUBS, stubs, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        return "copied"
    protos = sorted(str(path.relative_to(checkout)) for path in (checkout / _PROTOS).glob("*.proto"))
    outputs = [f"--{kind}_out=." for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iprotos", *outputs, *protos]
    done = subprocess.run(command, check=False, cwd=checkout, capture_output=True, text=True)
    if done.returncode:
        raise CheckoutError(f"no stubs for {checkout}, whose protos are others: {done.stderr.strip()[-500:]}")
    (stubs / "__init__.py").write_text('"""The wire, generated from protos/outrider/v1."""\n')
    return "compiled"


def _same_files(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.glob("*.proto"))
    if not names or names != sorted(path.name for path in other.glob("*.proto")):
        return False
    return filecmp.cmpfiles(one, other, names, shallow=False)[0] == names


def _git(directory: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(directory), *arguments], check=True, capture_output=True).stdout
