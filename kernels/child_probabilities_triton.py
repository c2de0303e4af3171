"""The Triton kernel of `kernels.child_probabilities`: a program a row, in place of some twenty small kernels."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.child_probabilities import (
    ACCEPTANCE_SLOPE,
    LEAST_ACCEPTANCE,
    REST_PER_CHILD,
    REST_PER_CHILD_REJECTED,
    STEEPNESS,
    STEEPNESS_REJECTED,
    ChildEstimates,
)
from kernels.limits import WEIGHT_TOTAL


def launch_estimate_children(
    scores: torch.Tensor,  # [n, F] float32
    largest_weights: torch.Tensor,  # [n] int16 or int32, any stride
    is_tested: torch.Tensor,  # [n] bool
    out: ChildEstimates,
) -> None:
    """`estimate_children` on the GPU."""
    num_rows, num_children = scores.shape
    _estimate_children_kernel[(num_rows,)](
        scores,
        largest_weights,
        is_tested.view(torch.uint8),
        out.logps,
        out.units,
        largest_weights.stride(0),
        CHILDREN=num_children,
        LANES=triton.next_power_of_2(num_children),
        TOTAL=WEIGHT_TOTAL,
        STEEPNESS=STEEPNESS,
        REST=REST_PER_CHILD,
        STEEPNESS_REJECTED=STEEPNESS_REJECTED,
        REST_REJECTED=REST_PER_CHILD_REJECTED,
        LEAST=LEAST_ACCEPTANCE,
        SLOPE=ACCEPTANCE_SLOPE,
        num_warps=1,
    )


@triton.jit
def _shares(scores, is_one, last, num, steepness, rest_per_child):
    """Shares of the scores at `is_one`, whose last is `last`, `num` of them."""
    largest = tl.max(tl.where(is_one, scores, -float("inf")), axis=0)
    largest = tl.where(largest > -float("inf"), largest, 0.0)
    weights = tl.where(is_one, tl.exp(steepness * (scores - largest)), 0.0)
    rest = rest_per_child * num * tl.exp(steepness * (last - largest))
    return weights / tl.maximum(tl.sum(weights, axis=0) + rest, 1e-30)


@triton.jit
def _estimate_children_kernel(
    scores_ptr,
    weights_ptr,
    is_tested_ptr,
    logps_ptr,
    units_ptr,
    weights_stride,
    CHILDREN: tl.constexpr,
    LANES: tl.constexpr,
    TOTAL: tl.constexpr,
    STEEPNESS: tl.constexpr,
    REST: tl.constexpr,
    STEEPNESS_REJECTED: tl.constexpr,
    REST_REJECTED: tl.constexpr,
    LEAST: tl.constexpr,
    SLOPE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    children = tl.arange(0, LANES)
    is_child = children < CHILDREN
    scores = tl.load(scores_ptr + row * CHILDREN + children, mask=is_child, other=-float("inf"))
    last = tl.load(scores_ptr + row * CHILDREN + CHILDREN - 1)
    weight = tl.load(weights_ptr + row * weights_stride).to(tl.int32) & (TOTAL - 1)
    is_tested = tl.load(is_tested_ptr + row) != 0
    shares = _shares(scores, is_child, last, CHILDREN, STEEPNESS, REST)
    certainty = tl.where(weight > 0, weight.to(tl.float32) / TOTAL, 1.0)
    accepted = LEAST + SLOPE * certainty
    others = _shares(scores, is_child & (children > 0), last, CHILDREN - 1, STEEPNESS_REJECTED, REST_REJECTED)
    tested = tl.where(children == 0, accepted, (1 - accepted) * others)
    shares = tl.where(is_tested, tested, shares)
    logps = tl.where(shares > 0, tl.log(tl.maximum(shares, 1e-30)), -float("inf"))
    tl.store(logps_ptr + row * CHILDREN + children, logps, mask=is_child)
    units = tl.minimum(shares * TOTAL, TOTAL - 1).to(tl.int32)
    tl.store(units_ptr + row * CHILDREN + children, units.to(units_ptr.dtype.element_ty), mask=is_child)
