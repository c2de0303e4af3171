"""Compile the sampling kernels for sm_90 without a GPU, as the public functions launch them; prints a summary as JSON.

A program of its own, because Triton either interprets or compiles in one process.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import kernels.rejection_sample_triton
from kernels.dispatch import interpreted_kernels
from kernels.draft_sample import draft_sample
from kernels.penalty_tables import PenaltyTables, apply_penalty_tables
from kernels.random import Purpose, random_words
from tests.kernels.dependent_launch_rules import broken_rules
from tests.kernels.sampling_cases import Case, make_case

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.uint8: "*u8",
}
compiled: dict[str, dict[str, int]] = {}
early: dict[str, list[str]] = {}  # what variants do before the kernel ahead of them has ended, and should not


def compile_launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Stands in for a launch: compile the kernel for the arguments' types, as Triton would specialise it."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | {
        name: value for name, value in kwargs.items() if name in kernel.arg_names
    }
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        if isinstance(value, float):
            signature[parameter.name] = "fp32"
            continue
        signature[parameter.name] = TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
        if isinstance(value, torch.Tensor) or value % 16 == 0:
            attributes[(place,)] = [["tt.divisibility", 16]]
    key = f"{kernel.__name__} {sorted(signature.items())} {sorted(constants.items(), key=str)} {options}"
    if key not in compiled:
        binary = triton.compile(ASTSource(kernel, signature, constants, attributes), target=HOPPER, options=options)
        assert binary.asm["cubin"]
        ptx = binary.asm["ptx"]
        compiled[key] = {
            "shared_bytes": int(binary.metadata.shared),
            "has_local_memory": int("ld.local" in ptx),
            "stack_bytes": stack_bytes(binary.asm["cubin"]),
        }
        if constants.get("IS_FOLLOWING") and (broken := broken_rules(ptx, early_loads="none")):
            early[key] = broken


def stack_bytes(cubin: bytes) -> int:
    """Local memory of a thread: what registers did not hold, of which the PTX knows nothing yet."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return max(int(size) for size in re.findall(r"STACK:(\d+)", run.stdout + run.stderr))


def cases() -> Iterator[Case]:
    yield make_case([0, 4, 2, 3], 128_256, dtype=torch.bfloat16, num_candidates=64)
    yield make_case([0, 4, 2, 3], 128_256, dtype=torch.bfloat16, num_candidates=64, has_filters=True)
    yield make_case([0, 32], 4_097, dtype=torch.float16, has_filters=True, has_penalties=True)
    yield make_case([0, 0], 16, has_coupled=False)


def main() -> None:
    prepared = list(cases())
    JITFunction.run = compile_launch
    # As on the GPU that is compiled for. The module has imported the function; mypy knows only that it is a module.
    for module in (kernels.rejection_sample_triton,):
        module.has_dependent_launch = lambda device: True  # type: ignore[attr-defined]
    with interpreted_kernels():
        for case in prepared:
            case.run()
        # 20: the slots of fewer candidates are padded differently. 256: tiles of all pairs would not fit in registers.
        for case, num_candidates, num_outcomes in zip(
            (*prepared[:2], *prepared[:2]), (64, 20, 256, 128), (4, 1, 8, 0), strict=True
        ):
            draft_sample(
                case.target_logits[: len(case.seeds)],
                case.temperature,
                case.seeds,
                case.positions,
                top_p=case.top_p,
                num_candidates=num_candidates,
                # As the services draft.
                max_candidates=torch.ones_like(case.seeds, dtype=torch.int32),
                is_coupled=case.is_coupled,
                num_outcomes=num_outcomes,
            )
        for case in prepared:
            logits = case.target_logits
            tables = PenaltyTables.empty(2, logits.shape[1], logits.device)
            apply_penalty_tables(logits, torch.zeros(len(logits), dtype=torch.int32), tables)
        random_words(case.seeds, case.positions, Purpose.ACCEPT)
    names = Counter(key.split()[0] for key in compiled)
    print(
        json.dumps(
            {
                "kernels": dict(names),
                "shared_bytes": max(entry["shared_bytes"] for entry in compiled.values()),
                "stack_bytes": {
                    name: max(entry["stack_bytes"] for key, entry in compiled.items() if key.split()[0] == name)
                    for name in names
                },
                "early": early,
                "local": sorted({key.split()[0] for key, entry in compiled.items() if entry["has_local_memory"]}),
            }
        )
    )


if __name__ == "__main__":
    main()
