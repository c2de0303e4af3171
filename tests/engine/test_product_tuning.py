"""Matrix products of CUDA graphs: the ones that are tuned are found, and what is chosen computes the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM

from engine.batch import SequenceSlice, build_batch
from engine.cublaslt import CublasLtError, Product, ProductShape
from engine.cuda_graph import GraphPool
from engine.model_runner import ModelRunner
from engine.product_tuning import ProductTuner

CPU = torch.device("cpu")
BF16 = torch.bfloat16


class Suggested:
    """Products as cuBLASLt would compute them, with three algorithms of which the second never works."""

    made: list[ProductShape]
    runs: list[tuple[ProductShape, int]]

    def __init__(self, shape: ProductShape) -> None:
        self.made.append(shape)
        self.num_algorithms = 3
        self._shape = shape

    def run(self, algorithm: int, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        if algorithm == 1:
            raise CublasLtError("not supported")
        self.runs.append((self._shape, algorithm))
        result = x.float() @ weight.float().t()
        out.copy_(out.float() + result if self._shape.is_added else result)


@pytest.fixture
def suggested() -> type[Suggested]:
    return type("Fresh", (Suggested,), {"made": [], "runs": []})


def tuner_with(suggested: type[Suggested], times: Sequence[float]) -> ProductTuner:
    def microseconds(calls: Sequence[Callable[[], None]]) -> list[float]:
        assert len(calls) == len(times)  # torch's own, and the two that work
        return list(times)

    return ProductTuner(CPU, make_product=suggested, microseconds=microseconds)


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tuned(tuner: ProductTuner, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the work gives before it is tuned, and after."""
    with torch.inference_mode():
        with tuner.noting():
            before = work()
        tuner.tune()
        with tuner.tuned():
            after = work()
    return before, after


X, WEIGHT = random(5, 32), random(24, 32, seed=1)
PRODUCTS: dict[str, tuple[Callable[[], torch.Tensor], ProductShape]] = {
    "linear": (lambda: F.linear(X, WEIGHT), ProductShape(5, 24, 32, 32, BF16, False)),
    "linear over [1, num_tokens, size]": (
        lambda: F.linear(X.unsqueeze(0), WEIGHT),
        ProductShape(5, 24, 32, 32, BF16, False),
    ),
    "mm": (lambda: torch.mm(X, WEIGHT.t()), ProductShape(5, 24, 32, 32, BF16, False)),
    "added": (lambda: torch.ones(5, 24, dtype=BF16).addmm_(X, WEIGHT.t()), ProductShape(5, 24, 32, 32, BF16, True)),
    "rows apart": (lambda: F.linear(random(5, 48)[:, :32], WEIGHT), ProductShape(5, 24, 32, 48, BF16, False)),
    "float16": (lambda: F.linear(X.half(), WEIGHT.half()), ProductShape(5, 24, 32, 32, torch.float16, False)),
}
OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "bias": lambda: F.linear(X, WEIGHT, torch.ones(24, dtype=BF16)),
    "float32": lambda: F.linear(X.float(), WEIGHT.float()),
    "a weight that is not transposed": lambda: torch.mm(X, random(32, 24)),
    "rows that are not aligned": lambda: F.linear(random(5, 36)[:, :32], WEIGHT),
    "outputs that are not aligned": lambda: F.linear(X, random(25, 32)),
    "a start that is not aligned": lambda: F.linear(random(5, 40)[:, 4:36], WEIGHT),
    "no rows": lambda: F.linear(X[:0], WEIGHT),
    "scaled": lambda: torch.ones(5, 24, dtype=BF16).addmm_(X, WEIGHT.t(), beta=0.5),
    "a bias added in place": lambda: torch.addmm(torch.ones(24, dtype=BF16), X, WEIGHT.t()),
}


@pytest.mark.parametrize("name", list(PRODUCTS))
def test_products_are_found(suggested: type[Suggested], name: str) -> None:
    work, shape = PRODUCTS[name]
    before, after = tuned(tuner_with(suggested, [9.0, 8.0, 5.0]), work)
    assert suggested.made == [shape]
    assert suggested.runs[-1] == (shape, 2)
    assert after.shape == before.shape
    assert torch.equal(after, before)


@pytest.mark.parametrize("name", list(OTHERS))
def test_other_products_are_left_to_torch(suggested: type[Suggested], name: str) -> None:
    before, after = tuned(tuner_with(suggested, []), OTHERS[name])
    assert suggested.made == []
    assert torch.equal(after, before)


def test_products_on_another_device_are_left_to_torch(suggested: type[Suggested]) -> None:
    tuner = ProductTuner(torch.device("meta"), make_product=suggested)
    tuned(tuner, lambda: F.linear(X, WEIGHT))
    assert suggested.made == []


@pytest.mark.parametrize(
    ("times", "algorithm"),
    [
        ([9.0, 8.0, 5.0], 2),
        ([9.0, 5.0, 4.95], 0),  # not so much faster that it could not be the clock
        ([9.0, 8.95, 8.9], None),
        ([5.0, 9.0, 8.0], None),
    ],
)
def test_the_fastest_is_chosen(suggested: type[Suggested], times: list[float], algorithm: int | None) -> None:
    tuner = tuner_with(suggested, times)
    with torch.inference_mode():
        with tuner.noting():
            F.linear(X, WEIGHT)
        tuner.tune()
        suggested.runs.clear()
        with tuner.tuned():
            F.linear(X, WEIGHT)
    assert [run[1] for run in suggested.runs] == ([] if algorithm is None else [algorithm])
    assert tuner.summary.startswith(f"{int(algorithm is not None)} of 1 ")


def test_each_shape_is_tuned_once(suggested: type[Suggested]) -> None:
    tuner = tuner_with(suggested, [9.0, 8.0, 5.0])
    for num_rows in (5, 5, 3, 5):
        tuned(tuner, lambda num_rows=num_rows: F.linear(X[:num_rows], WEIGHT))  # type: ignore[misc]
    assert [shape.num_rows for shape in suggested.made] == [5, 3]


def test_weights_of_several_layers_are_timed(suggested: type[Suggested]) -> None:
    """One weight again and again would be read from a cache, which no layer finds it in."""
    weights = [random(24, 32, seed=seed) for seed in range(3)]
    timed: list[torch.Tensor] = []

    class Recording(suggested):  # type: ignore[misc, valid-type]
        def run(self, algorithm: int, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
            super().run(algorithm, x, weight, out)
            timed.append(weight)

    def microseconds(calls: Sequence[Callable[[], None]]) -> list[float]:
        timed.clear()
        calls[1]()
        return [1.0] * len(calls)

    tuner = ProductTuner(CPU, make_product=Recording, microseconds=microseconds)
    tuned(tuner, lambda: torch.stack([F.linear(X, weight) for weight in weights]))
    assert len(timed) == 8
    assert {weight.data_ptr() for weight in timed} == {weight.data_ptr() for weight in weights}


def test_without_the_library_torch_computes() -> None:
    if torch.version.cuda is not None:
        pytest.skip("there is a library")
    with pytest.raises(CublasLtError, match="without CUDA"):
        Product(ProductShape(5, 24, 32, 32, BF16, False))
    before, after = tuned(ProductTuner(CPU), lambda: F.linear(X, WEIGHT))
    assert torch.equal(after, before)


def make_runner(path: Path, device: torch.device) -> ModelRunner:
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=3,
        vocab_size=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(BF16).save_pretrained(path)
    return ModelRunner(path, device=device, dtype=BF16, num_blocks=8, is_fused=True)


def forward_of(runner: ModelRunner) -> Callable[[], torch.Tensor]:
    slices = [SequenceSlice([3, 1, 4], 0, [0], 3), SequenceSlice([1, 5], 0, [1], 2)]
    batch = build_batch(slices, block_size=runner.block_size, num_blocks=runner.num_blocks, device=runner.device)
    return lambda: runner.forward(batch)


def test_a_model_runs_on_what_was_chosen(suggested: type[Suggested], tmp_path: Path) -> None:
    """Catches a projection that torch dispatches in a way that is not recognised: it would be left as it is."""
    runner = make_runner(tmp_path, CPU)
    for weight in runner._model.parameters():
        weight.data = weight.data.clone()  # those of a file that is mapped into memory may stand anywhere
    forward = forward_of(runner)
    tuner = tuner_with(suggested, [9.0, 8.0, 5.0])
    before, _ = tuned(tuner, forward)
    shapes = {shape[:3]: shape.is_added for shape in suggested.made}
    assert shapes == {(5, 256, 128): False, (5, 128, 128): False, (5, 512, 128): False, (5, 128, 256): True}
    suggested.runs.clear()
    with torch.inference_mode(), tuner.tuned():
        after = forward()
    # QKV, output, gate and up, down of three layers, and the head; gate and up are as large as the head.
    assert len(suggested.runs) == 3 * 4 + 1
    assert {algorithm for _, algorithm in suggested.runs} == {2}
    torch.testing.assert_close(after, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("shape", [(1, 256, 128), (5, 6144, 4096), (40, 4096, 14336), (160, 512, 64), (33, 248, 4096)])
def test_every_algorithm_computes_the_product(shape: tuple[int, int, int], is_added: bool, dtype: torch.dtype) -> None:
    num_rows, num_outputs, num_inputs = shape
    device = torch.device("cuda", 0)
    x = random(num_rows, num_inputs + 8, dtype=dtype).to(device)[:, :num_inputs]
    weight = random(num_outputs, num_inputs, dtype=dtype, seed=1).to(device)
    added = random(num_rows, num_outputs, dtype=dtype, seed=2).to(device)
    exact = x.double() @ weight.double().t() + (added.double() if is_added else 0.0)
    product = Product(ProductShape(num_rows, num_outputs, num_inputs, num_inputs + 8, dtype, is_added))
    assert product.num_algorithms >= 1
    errors = []
    for algorithm in range(product.num_algorithms):
        out = added.clone()
        product.run(algorithm, x, weight, out)
        errors.append(float((out.double() - exact).norm() / exact.norm()))
    # Sums in float32, rounded once: half a unit in the last of 8 or 11 bits, at most.
    assert max(errors) < (2**-8 if dtype == torch.bfloat16 else 2**-11)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_graphs_hold_what_was_chosen(tmp_path: Path) -> None:
    """Every product by another algorithm than torch's, recorded and replayed."""

    def microseconds(calls: Sequence[Callable[[], None]]) -> list[float]:
        for call in calls:
            call()
        return [float(len(calls) - index) for index in range(len(calls))]  # the last one is always the fastest

    runner = make_runner(tmp_path, torch.device("cuda"))
    forward = forward_of(runner)
    expected = forward().clone()
    tuner = ProductTuner(runner.device, microseconds=microseconds)
    pool, outputs = GraphPool(runner.device, tuner), []
    graph = pool.capture(lambda: outputs.append(forward()))
    assert tuner.summary.startswith("4 of 4 ")
    graph.replay()
    torch.cuda.synchronize()
    difference = (outputs[-1].float() - expected.float()).norm() / expected.float().norm()
    assert difference < 0.02
