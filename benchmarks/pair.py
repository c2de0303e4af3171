"""Write the benchmark's pair of models, whose agreement is a property of their weights and is measured, not claimed.

    python -m benchmarks.pair --out DIR [--agreement 0.8] [--shape 8b]

The target is a Llama with random weights. The drafter is the target's own first layers, final norm and head. How far
the deeper layers move the hidden state decides how alike the two are: their output projections are damped until the
mean of sum(min(p, q)), on text that the target writes, is the value asked for.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.calibration import Agreement, Contexts, calibrate, measure
from benchmarks.pair_weights import Pair, build_pair, save_model
from benchmarks.records import EXIT_REFUSED, RefusalError, environment, progress
from benchmarks.shapes import SHAPES, PairShape
from benchmarks.timing import free_memory, resolve_device

_MANIFEST = "pair.json"
_CONTEXTS = {
    "8b": Contexts(num_prompts=64, num_prompt_tokens=128, num_sampled_tokens=96),
    "tiny": Contexts(num_prompts=24, num_prompt_tokens=16, num_sampled_tokens=48),
}
_AGREEMENT_TOLERANCE = 0.02
_ENTROPY_TOLERANCE = 0.3  # nats


@dataclass(frozen=True)
class Request:
    """Which pair to make; the same request gives the same pair, up to the rounding of the machine."""

    shape_name: str = "8b"
    agreement: float = 0.8
    entropy: float = 3.0
    seed: int = 0
    damping: float | None = None  # None: searched
    norm_scale: float | None = None  # None: searched

    @property
    def shape(self) -> PairShape:
        """The dimensions."""
        return SHAPES[self.shape_name]


@dataclass(frozen=True)
class PairDirectory:
    """A pair on disk."""

    path: Path
    request: Request
    measured: Agreement

    @property
    def target(self) -> Path:
        """The target's Hugging Face directory."""
        return self.path / "target"

    @property
    def drafter(self) -> Path:
        """The drafter's Hugging Face directory."""
        return self.path / "drafter"

    @property
    def shape(self) -> PairShape:
        """The dimensions."""
        return self.request.shape


def open_pair(path: Path) -> PairDirectory:
    """A pair that was written before. Raises FileNotFoundError where there is none."""
    manifest = json.loads((path / _MANIFEST).read_text())
    return PairDirectory(path, Request(**manifest["request"]), Agreement(**manifest["measured"]))


def ensure_pair(path: Path, request: Request, device: torch.device) -> PairDirectory:
    """The pair at `path`, written anew unless it is already the one asked for."""
    try:
        pair = open_pair(path)
        if pair.request == request:
            progress(f"the pair in {path} is the one asked for")
            return pair
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        pass
    return write_pair(path, request, device)


def write_pair(path: Path, request: Request, device: torch.device) -> PairDirectory:
    """Make a pair, measure it and write it. Raises RefusalError when it does not measure as asked."""
    start = time.monotonic()
    pair, manifest = make_pair(request, device)
    progress(f"writing to {path}")
    path.mkdir(parents=True, exist_ok=True)
    (path / _MANIFEST).unlink(missing_ok=True)
    save_model(pair.target, path / "target", progress)
    save_model(pair.drafter, path / "drafter", progress)
    del pair
    free_memory(device)
    manifest["seconds"] = round(time.monotonic() - start, 1)
    # Last, so that a directory with a manifest is complete.
    (path / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return open_pair(path)


def make_pair(request: Request, device: torch.device) -> tuple[Pair, dict[str, Any]]:
    """A pair in the device's memory, and what is to be known of it. Raises RefusalError as `write_pair` does."""
    contexts = _CONTEXTS[request.shape_name]
    progress(f"random weights of shape {request.shape_name} on {device}")
    pair = build_pair(request.shape, seed=request.seed, device=device)
    damping, norm_scale = request.damping, request.norm_scale
    if damping is None or norm_scale is None:
        damping, norm_scale = calibrate(
            pair,
            agreement=request.agreement,
            entropy=request.entropy,
            contexts=contexts,
            seed=1000 + request.seed,
            num_rounds=3,
            report=progress,
        )
    pair.set_norm_scale(norm_scale)
    pair.damp(damping)
    # The weights as they will be written, on text that the search has not seen.
    measured = measure(pair, contexts.draw(pair.target, 2000 + request.seed), contexts.num_sampled_tokens)
    progress(
        f"measured over {measured.num_positions} positions: agreement {measured.agreement:.4f}, the same greedily "
        f"{measured.greedy_agreement:.4f}, entropy {measured.target_entropy:.3f} nats of the target, "
        f"{measured.drafter_entropy:.3f} of the drafter"
    )
    for num_candidates, value in measured.candidate_agreement.items():
        progress(f"agreement with q cut to its {num_candidates} likeliest tokens: {value:.4f}")
    progress(f"expected acceptance length at K = 4: {measured.expected_acceptance_length(4):.2f}")
    if request.damping is None:
        _check(request, measured)
    manifest = {
        "request": asdict(request),
        "measured": asdict(measured),
        "damping": damping,
        "norm_scale": norm_scale,
        "contexts": asdict(contexts),
        "environment": environment(device),
    }
    return pair, manifest


def default_directory(shape: PairShape) -> Path:
    """Where a pair is best kept: in memory where there is room for it, on disk otherwise."""
    needed = 1.2 * (shape.target.step_weight_bytes + shape.drafter.step_weight_bytes)
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > needed + (2 << 30)
    return (memory if has_room else Path(tempfile.gettempdir())) / "outrider-pair"


def _check(request: Request, measured: Agreement) -> None:
    if abs(measured.agreement - request.agreement) > _AGREEMENT_TOLERANCE:
        raise RefusalError(f"the agreement measured is {measured.agreement:.3f}, asked for was {request.agreement:.3f}")
    if abs(measured.target_entropy - request.entropy) > _ENTROPY_TOLERANCE:
        raise RefusalError(
            f"the entropy measured is {measured.target_entropy:.2f}, asked for was {request.entropy:.2f}"
        )


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that name or describe a pair."""
    parser.add_argument("--pair", type=Path, help="directory of the pair; written if it is not there (default: chosen)")
    parser.add_argument("--agreement", type=float, default=0.8, help="E[sum min(p, q)] at temperature 1 (default 0.8)")
    parser.add_argument("--entropy", type=float, default=3.0, help="of the target, nats (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default 0)")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b", help="dimensions (default 8b)")


def pair_of(arguments: argparse.Namespace, device: torch.device) -> PairDirectory:
    """The pair that the flags of `add_pair_arguments` describe; a pair that is there is taken as it is."""
    path: Path | None = arguments.pair
    request = Request(arguments.shape, arguments.agreement, arguments.entropy, arguments.seed)
    if path is not None and (path / _MANIFEST).exists():
        return open_pair(path)
    return ensure_pair(path or default_directory(request.shape), request, device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pair; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory to write (default: in memory, or on disk without room)")
    parser.add_argument("--agreement", type=float, default=0.8, help="E[sum min(p, q)] at temperature 1 (default 0.8)")
    parser.add_argument("--entropy", type=float, default=3.0, help="of the target, nats (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default 0)")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b", help="dimensions (default 8b)")
    parser.add_argument("--damping", type=float, help="with --norm-scale: take these instead of searching")
    parser.add_argument("--norm-scale", type=float)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="the same as --shape tiny")
    options = parser.parse_args(arguments)
    if (options.damping is None) != (options.norm_scale is None):
        parser.error("--damping and --norm-scale belong together")
    request = Request(
        "tiny" if options.tiny else options.shape,
        options.agreement,
        options.entropy,
        options.seed,
        options.damping,
        options.norm_scale,
    )
    device = resolve_device(options.device)
    path = options.out or default_directory(request.shape)
    try:
        ensure_pair(path, request, device)
    except RefusalError as error:
        print(f"\nREFUSED, nothing written: {error}", flush=True)
        return EXIT_REFUSED
    print(f"\n{path}")
    print((path / _MANIFEST).read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
