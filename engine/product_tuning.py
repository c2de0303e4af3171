"""The fastest of cuBLAS's algorithms for each matrix product of the CUDA graphs, found by timing them.

cuBLAS chooses by a model of the device, and for the few rows of a decoding step it often has a faster algorithm than
the one it puts first. A graph's shapes are known before it is captured, so each product is timed once with all that the
library suggests. Products are recognised as torch dispatches them, whatever module they are part of.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.cublaslt import ALIGNMENT, CublasLtError, Product, ProductShape

logger = logging.getLogger(__name__)

# An algorithm must be faster by this much than those that are suggested before it: clocks differ by less.
MIN_GAIN = 0.02
_NUM_RUNS = 7
# Timed as in a forward pass, where every layer brings a weight of its own that no cache holds yet: one after another,
# until they are so large together.
_BYTES_IN_A_ROW = 256 << 20
_MAX_IN_A_ROW = 8


class _Suggested(Protocol):
    """What is used of `Product`."""

    @property
    def num_algorithms(self) -> int: ...

    def run(self, algorithm: int, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class _Operands:
    """x @ weight.T, as torch was asked for it."""

    x: torch.Tensor  # [num_rows, num_inputs]
    weight: torch.Tensor  # [num_outputs, num_inputs]
    added: torch.Tensor | None  # [num_rows, num_outputs], which the product is added to in place
    out_shape: tuple[int, ...]

    @property
    def shape(self) -> ProductShape:
        num_rows, num_inputs = self.x.shape
        is_added = self.added is not None
        return ProductShape(num_rows, len(self.weight), num_inputs, self.x.stride(0), self.x.dtype, is_added)

    def new_output(self) -> torch.Tensor:
        return self.x.new_empty(len(self.x), len(self.weight))


@dataclass
class _Noted:
    """A shape's operands, and weights of other layers."""

    operands: _Operands
    weights: dict[int, torch.Tensor] = field(default_factory=dict)  # by address

    def add(self, weight: torch.Tensor) -> None:
        if len(self.weights) * weight.nbytes < _BYTES_IN_A_ROW and len(self.weights) < _MAX_IN_A_ROW:
            self.weights.setdefault(weight.data_ptr(), weight)

    @property
    def row(self) -> list[torch.Tensor]:
        """The weights to be multiplied by, one after another."""
        length = min(-(-_BYTES_IN_A_ROW // self.operands.weight.nbytes), _MAX_IN_A_ROW)
        return list(islice(cycle(self.weights.values()), length))


@dataclass(frozen=True)
class _Choice:
    product: _Suggested
    algorithm: int


class ProductTuner:
    """Times products that were noted, and runs them with what was fastest. Of one thread and one device."""

    def __init__(
        self,
        device: torch.device,
        *,
        make_product: Callable[[ProductShape], _Suggested] = Product,
        microseconds: Callable[[Sequence[Callable[[], None]]], list[float]] | None = None,  # None: by a GPU's clock
    ) -> None:
        self._device = device
        self._make_product = make_product
        self._microseconds = microseconds or partial(_microseconds, device=device)
        self._noted: dict[ProductShape, _Noted] = {}
        self._choices: dict[ProductShape, _Choice | None] = {}  # None: what torch does

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note the products that are computed here, for `tune`."""

        def note(operands: _Operands) -> torch.Tensor | None:
            if operands.shape not in self._choices:
                self._noted.setdefault(operands.shape, _Noted(operands)).add(operands.weight)
            return None

        with _Products(self._device, note):
            yield

    def tune(self) -> None:
        """Time what was noted and is new. The weights are read, nothing is written but memory of its own."""
        with torch.inference_mode():
            for shape, noted in self._noted.items():
                self._choices[shape] = self._fastest(noted)
        self._noted.clear()

    @contextmanager
    def tuned(self) -> Iterator[None]:
        """Compute products here with the algorithms that were found; those that were not timed as torch does."""

        def run(operands: _Operands) -> torch.Tensor | None:
            choice = self._choices.get(operands.shape)
            if choice is None:
                return None
            out = operands.new_output() if operands.added is None else operands.added
            choice.product.run(choice.algorithm, operands.x, operands.weight, out)
            return out

        with _Products(self._device, run):
            yield

    @property
    def summary(self) -> str:
        """What came out, for the log."""
        num_changed = sum(choice is not None for choice in self._choices.values())
        return f"{num_changed} of {len(self._choices)} matrix products run with another algorithm than cuBLAS's first"

    def _fastest(self, noted: _Noted) -> _Choice | None:
        operands, weights = noted.operands, noted.row
        shape, x, out = operands.shape, operands.x, operands.new_output().zero_()
        try:
            product = self._make_product(shape)
        except CublasLtError as error:
            logger.debug("%s", error)
            return None
        calls = [partial(_in_a_row, partial(_torch_product, is_added=shape.is_added), x, weights, out)]
        choices: list[_Choice | None] = [None]
        for algorithm in range(product.num_algorithms):
            run = partial(product.run, algorithm)
            try:
                run(x, weights[0], out)
            except CublasLtError as error:
                logger.debug("%s, algorithm %d: %s", shape, algorithm, error)
                continue
            calls.append(partial(_in_a_row, run, x, weights, out))
            choices.append(_Choice(product, algorithm))
        times = self._microseconds(calls)
        best = 0
        for index, time in enumerate(times):
            if time < (1 - MIN_GAIN) * times[best]:
                best = index
        logger.debug("%s: %.1f us in place of %.1f", shape, times[best] / len(weights), times[0] / len(weights))
        return choices[best]


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands the products among torch's operations to a function, which may answer with the result."""

    def __init__(self, device: torch.device, handle: Callable[[_Operands], torch.Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._handle = handle

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operands = None if kwargs else _operands(func, args)
        if operands is not None and operands.x.device == self._device and _is_regular(operands):
            result = self._handle(operands)
            if result is not None:
                return operands.added if operands.added is not None else result.view(operands.out_shape)
        return func(*args, **(kwargs or {}))


def _operands(func: Any, args: tuple[Any, ...]) -> _Operands | None:
    """The product that torch was asked for; None for anything else."""
    aten = torch.ops.aten
    if func is aten.linear.default:
        x, weight, *rest = args
        if any(bias is not None for bias in rest) or x.dim() < 2:
            return None
        return _Operands(x.flatten(0, -2), weight, None, (*x.shape[:-1], len(weight)))
    if func is aten.mm.default:
        x, transposed = args
        return _Operands(x, transposed.t(), None, (len(x), transposed.shape[1]))
    if func is aten.addmm_.default and len(args) == 3:
        added, x, transposed = args
        return _Operands(x, transposed.t(), added, tuple(added.shape)) if added.dim() == 2 else None
    return None


def _is_regular(operands: _Operands) -> bool:
    """Whether types and layouts are those that algorithms are asked for."""
    x, weight, added = operands.x, operands.weight, operands.added
    tensors = [x, weight] if added is None else [x, weight, added]
    return (
        x.dtype in (torch.float16, torch.bfloat16)
        and all(tensor.dtype == x.dtype and tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
        and weight.is_contiguous()
        and (added is None or added.is_contiguous())
        and x.stride(1) == 1
        and len(x) > 0
        and all(size * x.itemsize % ALIGNMENT == 0 for size in (x.stride(0), *weight.shape))
    )


def _torch_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, is_added: bool) -> None:
    if is_added:
        out.addmm_(x, weight.t())
    else:
        torch.mm(x, weight.t(), out=out)


def _in_a_row(
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    out: torch.Tensor,
) -> None:
    for weight in weights:
        run(x, weight, out)


def _microseconds(calls: Sequence[Callable[[], None]], *, device: torch.device) -> list[float]:
    """The median time of each call on the device, in turns."""
    num_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    other = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    for _ in range(_NUM_RUNS):
        for call, pairs in zip(calls, events, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            # Keeps the device busy until everything is queued, the first call as well: meanwhile the caches are written
            # back.
            for _ in range(4):
                other.zero_()
            call()
            start.record()
            call()
            end.record()
            pairs.append((start, end))
    torch.cuda.synchronize(device)
    return [statistics.median(1e3 * start.elapsed_time(end) for start, end in pairs) for pairs in events]
