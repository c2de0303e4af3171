"""Matrix products with an algorithm of one's choice: cuBLASLt's C interface.

torch runs the first algorithm that cuBLAS suggests for a product, and has no way to ask for another. The library is the
one that torch has loaded. Constants and structures are those of `cublasLt.h`, the same in CUDA 12 and 13.
Source: https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any, NamedTuple

import torch

# Of all that it is told of, pointers and rows: what torch's allocator gives, and what fast algorithms need.
ALIGNMENT = 16

_MAX_ALGORITHMS = 16
_MAX_WORKSPACE_BYTES = 32 << 20
_COMPUTE_32F = 68
_TYPE_32F = 0
_TYPES = {torch.float16: 2, torch.bfloat16: 14}
_TRANSPOSE_A = 3
_OPERATION_TRANSPOSE = 1
_PREFERENCE_WORKSPACE = 1
_PREFERENCE_REDUCTIONS = 3
_PREFERENCE_ALIGNMENTS = (5, 6, 7, 8)  # of A, B, C and D
# Parts of a split sum are added up in place or in float32, not in the results' own 16 bits.
_EXACT_REDUCTIONS = 1 | 2


class CublasLtError(RuntimeError):
    """The library is not there, or refuses what it was asked for."""


class ProductShape(NamedTuple):
    """What an algorithm is chosen for: x [num_rows, num_inputs] @ weight [num_outputs, num_inputs] transposed."""

    num_rows: int
    num_outputs: int
    num_inputs: int
    row_stride: int  # of x, elements
    dtype: torch.dtype  # float16 or bfloat16, of everything; sums are float32
    is_added: bool  # onto what the output holds


class _Algorithm(Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _Suggestion(Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Product:
    """A shape with the algorithms that the library suggests for it, best guess first."""

    def __init__(self, shape: ProductShape) -> None:
        """Raises CublasLtError when there is none, or no library."""
        self.shape = shape
        self._library, self._handle = _library()
        num_rows, num_outputs, num_inputs = shape[:3]
        # The library counts by columns: its A is the weight, its B is x, and what it writes is the output transposed.
        kind = _TYPES[shape.dtype]
        self._operation = self._make("MatmulDesc", c_int(_COMPUTE_32F), c_int(_TYPE_32F))
        self._set("MatmulDesc", self._operation, _TRANSPOSE_A, c_int32(_OPERATION_TRANSPOSE))
        self._weight = self._make_layout(kind, num_inputs, num_outputs, num_inputs)
        self._x = self._make_layout(kind, num_inputs, num_rows, shape.row_stride)
        self._out = self._make_layout(kind, num_outputs, num_rows, num_outputs)
        self._suggestions = self._ask()

    @property
    def num_algorithms(self) -> int:
        """At least one."""
        return len(self._suggestions)

    def run(self, algorithm: int, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Compute the product into `out` on the current stream; a CUDA graph may record it.

        The tensors are as the shape says, the weight and `out` contiguous, all aligned to ALIGNMENT bytes. Raises
        CublasLtError where the algorithm cannot run.
        """
        suggestion = self._suggestions[algorithm]
        # From torch's allocator: in a graph the memory is the graph's own.
        workspace = torch.empty(suggestion.workspace_bytes, dtype=torch.uint8, device=out.device)
        out_pointer = c_void_p(out.data_ptr())
        _check(
            self._library.cublasLtMatmul(
                self._handle,
                self._operation,
                byref(c_float(1.0)),
                c_void_p(weight.data_ptr()),
                self._weight,
                c_void_p(x.data_ptr()),
                self._x,
                byref(c_float(float(self.shape.is_added))),
                out_pointer,
                self._out,
                out_pointer,
                self._out,
                byref(suggestion.algorithm),
                c_void_p(workspace.data_ptr()),
                c_size_t(suggestion.workspace_bytes),
                c_void_p(torch.cuda.current_stream(out.device).cuda_stream),
            ),
            "cublasLtMatmul",
        )

    def _ask(self) -> list[_Suggestion]:
        preference = self._make("MatmulPreference")
        self._set("MatmulPreference", preference, _PREFERENCE_WORKSPACE, c_uint64(_MAX_WORKSPACE_BYTES))
        self._set("MatmulPreference", preference, _PREFERENCE_REDUCTIONS, c_uint32(_EXACT_REDUCTIONS))
        for attribute in _PREFERENCE_ALIGNMENTS:
            self._set("MatmulPreference", preference, attribute, c_uint32(ALIGNMENT))
        found, num_found = (_Suggestion * _MAX_ALGORITHMS)(), c_int()
        _check(
            self._library.cublasLtMatmulAlgoGetHeuristic(
                self._handle,
                self._operation,
                self._weight,
                self._x,
                self._out,
                self._out,
                preference,
                c_int(_MAX_ALGORITHMS),
                found,
                byref(num_found),
            ),
            f"no algorithm for {self.shape}",
        )
        return [suggestion for suggestion in found[: num_found.value] if suggestion.state == 0]

    def _make_layout(self, kind: int, num_rows: int, num_columns: int, stride: int) -> c_void_p:
        return self._make("MatrixLayout", c_int(kind), c_uint64(num_rows), c_uint64(num_columns), c_int64(stride))

    def _make(self, name: str, *arguments: Any) -> c_void_p:
        made = c_void_p()
        _check(getattr(self._library, f"cublasLt{name}Create")(byref(made), *arguments), f"cublasLt{name}Create")
        weakref.finalize(self, getattr(self._library, f"cublasLt{name}Destroy"), made)
        return made

    def _set(self, name: str, owner: c_void_p, attribute: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        call = getattr(self._library, f"cublasLt{name}SetAttribute")
        _check(call(owner, c_int(attribute), byref(value), size), f"attribute {attribute} of cublasLt{name}")


@cache
def _library() -> tuple[ctypes.CDLL, c_void_p]:
    """The library and a handle, which is for all threads and lives as long as the process."""
    if torch.version.cuda is None:
        raise CublasLtError("this torch was built without CUDA")
    name = f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise CublasLtError(str(error)) from error
    handle = c_void_p()
    create = library.cublasLtCreate
    create.argtypes = [POINTER(c_void_p)]
    _check(create(byref(handle)), "cublasLtCreate")
    return library, handle


def _check(status: int, what: str) -> None:
    if status != 0:
        raise CublasLtError(f"{what}: status {status}")
