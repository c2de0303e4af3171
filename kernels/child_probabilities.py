"""How likely each child of an expansion is to be what the target commits, estimated from what the drafter alone knows.

Estimates decide what is worth a row and nothing else: the output is the same whatever they are.

The constants were fitted, by most likelihood, to where the target's tokens stood among the draft model's, at 5,026
positions of the bundled pair's held-out texts at temperature 1, with noise drawn eight times. A softmax of the scores,
a little steeper than they are, tells the chances of every rank to within 0.05 in each tenth of the margins: coupled,
the first child's goes from 0.33 where the second is as good to 1.00 where it is 8 behind; greedy from 0.36.
"""

from __future__ import annotations

import torch

from kernels.limits import WEIGHT_TOTAL

# Where the target's token is the best of its own scores, log p + g or the logits. What is no child has as much as 0.75
# children of the last one's score have for each child that there is: 0.68, 0.77 and 0.75 of it for 2, 4 and 8.
_STEEPNESS = 1.1
_REST_PER_CHILD = 0.75
# Where the first child is drawn from q and tested: it is accepted as often as q is certain, 0.52 in the lowest tenth
# and 0.99 in the highest; after a rejection the scores of the others say less.
_LEAST_ACCEPTANCE = 0.41
_ACCEPTANCE_SLOPE = 0.52
_STEEPNESS_REJECTED = 0.47
_REST_PER_CHILD_REJECTED = 1.44


def child_logps(
    scores: torch.Tensor,  # [n, F] float32: of the first child, then falling ones of the others; -inf: no child
    largest_weights: torch.Tensor,  # [n] int16 with the bits of a uint16, or int32: of q's candidates; 0: q is certain
    is_tested: torch.Tensor,  # [n] bool: the first child was drawn from q, and is accepted with min(1, p / q)
) -> torch.Tensor:  # [n, F] float32, the logarithms of sums of at most 1; -inf for no child
    """Estimate each row's children; of rows that are not tested the weights are not looked at."""
    num_children = scores.shape[1]
    matched = _shares(scores, _STEEPNESS, _REST_PER_CHILD)
    weights = largest_weights.to(torch.int32) & (WEIGHT_TOTAL - 1)
    certainty = torch.where(weights > 0, weights.float() / WEIGHT_TOTAL, 1.0)
    accepted = (_LEAST_ACCEPTANCE + _ACCEPTANCE_SLOPE * certainty).unsqueeze(1)
    tested = accepted
    if num_children > 1:
        others = _shares(scores[:, 1:], _STEEPNESS_REJECTED, _REST_PER_CHILD_REJECTED)
        tested = torch.cat([accepted, (1 - accepted) * others], dim=1)
    return torch.where(is_tested.unsqueeze(1), tested, matched).log()


def _shares(
    scores: torch.Tensor,  # [n, F], falling
    steepness: float,
    rest_per_child: float,
) -> torch.Tensor:  # [n, F]
    first = scores[:, :1]
    weights = (steepness * (scores - torch.where(first > -torch.inf, first, 0.0))).exp()
    rest = rest_per_child * scores.shape[1] * weights[:, -1:]
    # Without any child that is possible, nothing is.
    return weights / (weights.sum(dim=1, keepdim=True) + rest).clamp(min=1e-30)
