"""Dense penalties: kernel against plain torch, and both against the ragged penalties that a target has."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.penalties import PenalizedSequence, Penalties, TokenHistory
from kernels.penalty_tables import PenaltyTables, apply_penalty_tables
from kernels.shape_logits import apply_penalties
from tests.kernels.conftest import TritonDevice


def random_tables(num_places: int, vocab_size: int) -> PenaltyTables:
    random = torch.Generator().manual_seed(vocab_size)
    shape = (num_places, vocab_size)
    return PenaltyTables(0.5 + torch.rand(shape, generator=random), torch.randn(shape, generator=random))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 63), (7, 111), (63, 1000), (5, 4099)])
def test_kernel_does_what_plain_torch_does(
    triton_device: TritonDevice, num_rows: int, vocab_size: int, dtype: torch.dtype
) -> None:
    """Catches columns left out or written beyond the row's end, and a row that has another one's penalties."""
    num_places = 5
    tables = random_tables(num_places, vocab_size)
    # Each row is followed by a column that is nobody's; all rows have one place, none, or one that another has too.
    room = 4 * torch.randn(num_rows, vocab_size + 1, generator=torch.Generator().manual_seed(num_rows))
    room[:, 3], room[:, 5], room[:, 7] = -torch.inf, torch.inf, 0.0
    room = room.to(dtype)
    places = torch.arange(num_rows, dtype=torch.int32) % (num_places + 1) - 1 if num_rows > 1 else torch.tensor([2])
    places = places.int()

    def run(device: torch.device) -> torch.Tensor:
        # What no program may read as a penalty: NaN stands in every place that no row has.
        here = PenaltyTables(tables.factors.to(device, copy=True), tables.additions.to(device, copy=True))
        for place in sorted(set(range(num_places)).difference(places.tolist())):
            here.factors[place], here.additions[place] = torch.nan, torch.nan
        changed = room.to(device, copy=True)
        apply_penalty_tables(changed[:, :vocab_size], places.to(device), here)
        return changed.cpu()

    expected = run(torch.device("cpu"))
    with triton_device() as device:
        actual = run(device)
    torch.testing.assert_close(actual, expected, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
    is_raw = places < 0
    assert torch.equal(actual[is_raw], room[is_raw])
    assert torch.equal(actual[:, vocab_size], room[:, vocab_size])
    assert not torch.equal(actual[~is_raw], room[~is_raw])


@pytest.mark.parametrize("vocab_size", [63, 1000])
def test_dense_penalties_are_those_of_a_target(device: torch.device, vocab_size: int) -> None:
    """Catches another order of dividing and subtracting, and a factor applied the wrong way round to one sign."""
    rng = np.random.default_rng(vocab_size)
    tokens = rng.integers(0, vocab_size, 40).tolist()
    history = TokenHistory(tokens[:10], tokens[10:], {int(tokens[0]): 2.5, int(tokens[-1]): -1.5})
    sequence = PenalizedSequence(1, history, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.25)
    logits = torch.from_numpy(rng.normal(size=(3, vocab_size)).astype(np.float32) * 3)
    penalties = Penalties.build([sequence], np.zeros(4, np.int64), np.array([], dtype=np.int64))
    expected = apply_penalties(logits, penalties, torch.empty(0, dtype=torch.int32)).dense(slice(None))

    tables = PenaltyTables.empty(3, vocab_size, device)
    for token in set(tokens):
        count, bias = tokens[10:].count(token), {tokens[0]: 2.5, tokens[-1]: -1.5}.get(token, 0.0)
        tables.factors[2, token] = 1.3
        tables.additions[2, token] = bias - 0.4 * (count > 0) - 0.25 * count
    changed = logits.to(device, copy=True)
    apply_penalty_tables(changed, torch.tensor([-1, 2, -1], dtype=torch.int32, device=device), tables)
    torch.testing.assert_close(changed.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(changed[1].cpu(), logits[1])


def test_arguments_are_checked() -> None:
    tables, places = PenaltyTables.empty(2, 8, torch.device("cpu")), torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="places"):
        apply_penalty_tables(torch.zeros(3, 8), places.long(), tables)
    with pytest.raises(ValueError, match="places"):
        apply_penalty_tables(torch.zeros(2, 8), places, tables)
    with pytest.raises(ValueError, match=r"tables\.factors"):
        apply_penalty_tables(torch.zeros(3, 9), places, tables)
