"""Compile the kernels of the fused modules for sm_90 without a GPU, as the public functions launch them.

Prints as JSON how many variants each kernel has, which use local memory, which load or store single 16-bit elements,
and which do something that they should not before the kernel ahead of them has ended. A program of its own, because
Triton either interprets or compiles in one process.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import kernels.rms_norm_triton
import kernels.rotary_triton
import kernels.silu_mul_triton
from kernels.dispatch import interpreted_kernels
from kernels.rms_norm import NormParameters, add_rms_norm, rms_norm
from kernels.rotary import HeadNorms, rotary, rotary_cos_sin, rotary_store_kv
from kernels.silu_mul import Activation, act_mul
from tests.kernels.dependent_launch_rules import broken_rules

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64"}

compiled: dict[str, str] = {}  # PTX of each variant


def compile_launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Stands in for a launch: compile the kernel for the arguments' types, as Triton would specialise it."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
            if isinstance(value, torch.Tensor) or value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    key = f"{kernel.__name__} {sorted(signature.items())} {sorted(constants.items(), key=str)} {options}"
    if key not in compiled:
        binary = triton.compile(ASTSource(kernel, signature, constants, attributes), target=HOPPER, options=options)
        assert binary.asm["cubin"]
        compiled[key] = binary.asm["ptx"]


def launch_all(
    dtype: torch.dtype, *, hidden: int, inner: int, heads: tuple[int, int, int], rotary_dim: int, has_norms: bool
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    x = torch.empty(5, hidden, dtype=dtype)
    norm = NormParameters(torch.empty(hidden, dtype=dtype), 1e-5)
    rms_norm(x, norm)
    add_rms_norm(x, x, output_norm=norm if has_norms else None, next_norm=norm)
    add_rms_norm(x, x, output_norm=norm if has_norms else None, next_norm=None)
    for activation in Activation if has_norms else (Activation.SILU,):
        act_mul(torch.empty(5, 2 * inner, dtype=dtype), activation)
    qkv = torch.empty(5, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    cos = torch.empty(5, rotary_dim, dtype=dtype)
    head_norm = NormParameters(torch.empty(head_dim, dtype=dtype), 1e-6)
    norms = HeadNorms(head_norm, head_norm) if has_norms else None
    rotary(qkv, cos, cos, num_heads=num_heads, num_kv_heads=num_kv_heads, norms=norms)
    cache = torch.empty(2, 16, num_kv_heads, head_dim, dtype=dtype)
    slots = torch.empty(5, dtype=torch.int64)
    rotary_store_kv(qkv, cos, cos, cache, cache, slots, num_heads=num_heads, norms=norms)
    rotary_cos_sin(slots, torch.empty(rotary_dim // 2), scale=1.0, dtype=dtype)


def early(key: str) -> list[str]:
    """What a variant does before the kernel ahead of it has ended, and should not."""
    kernel = key.split()[0]
    if kernel == "_cos_sin_kernel":
        return []
    # A norm's weights.
    return broken_rules(compiled[key], early_loads=r".*" if kernel == "_rms_norm_kernel" else "none")


def main() -> None:
    JITFunction.run = compile_launch
    for module in (kernels.rms_norm_triton, kernels.rotary_triton, kernels.silu_mul_triton):
        # As on the GPU that is compiled for. Each has imported the function; mypy knows only that they are modules.
        module.has_dependent_launch = lambda device: True  # type: ignore[attr-defined]
    with interpreted_kernels():
        launch_all(torch.bfloat16, hidden=4096, inner=14336, heads=(32, 8, 128), rotary_dim=128, has_norms=False)
        launch_all(torch.bfloat16, hidden=4096, inner=12288, heads=(32, 8, 128), rotary_dim=128, has_norms=True)
        wide = dict(compiled)
        launch_all(torch.float32, hidden=8192, inner=28672, heads=(16, 8, 256), rotary_dim=256, has_norms=False)
        launch_all(torch.float16, hidden=3000, inner=1111, heads=(14, 2, 80), rotary_dim=32, has_norms=True)
    # One warp writes the cosines of a token, a few elements a thread.
    narrow = [
        key for key, ptx in wide.items() if "_cos_sin" not in key and re.search(r"(ld|st)\.global[.\w]*\.b16", ptx)
    ]
    print(
        json.dumps(
            {
                "kernels": dict(Counter(key.split()[0] for key in compiled)),
                "local": sorted(key for key, ptx in compiled.items() if re.search(r"(ld|st)\.local", ptx)),
                "narrow": sorted(narrow),
                "early": {key: broken for key in compiled if (broken := early(key))},
            }
        )
    )


if __name__ == "__main__":
    main()
