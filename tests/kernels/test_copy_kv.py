"""Copies of cache slots, in all layers at once, against copies one by one."""

from __future__ import annotations

import pytest
import torch

from kernels.copy_kv import copy_kv
from tests.kernels.conftest import TritonDevice


def check_copies(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Random pairs, some of them none, out of and into anywhere; what is no destination stays as it was."""
    generator = torch.Generator().manual_seed(sum(shape))
    num_slots, num_pairs = shape[-4] * shape[-3], 23
    before = torch.randn(shape, generator=generator).to(dtype)
    slots = torch.randperm(num_slots, generator=generator)
    before.flatten(-4, -3)[..., slots[-1], :, :] = float("nan")  # nobody's
    sources, destinations = slots[:num_pairs].clone(), slots[num_pairs : 2 * num_pairs].clone()
    sources[[0, 7]] = -1
    destinations[[7, 9, 22]] = -1
    caches = before.clone().to(device)
    copy_kv(caches, sources.to(device), destinations.to(device))
    expected = before.clone().flatten(-4, -3)
    for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
        if source >= 0 and destination >= 0:
            expected[..., destination, :, :] = expected[..., source, :, :]
    torch.testing.assert_close(caches.cpu(), expected.view(shape), atol=0.0, rtol=0.0, equal_nan=True)


# Layers' keys and values; as many as a program holds and one more; widths that are no powers of two; a layer alone.
SHAPES = [
    (8, 5, 16, 2, 64),
    (5, 4, 16, 3, 80),
    (2, 3, 16, 9, 256),
    (33, 4, 16, 1, 128),
    (4, 16, 2, 32),
    (2, 3, 4, 16, 1, 17),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_copies(torch.device("cpu"), shape, dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel(triton_device: TritonDevice, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with triton_device() as device:
        check_copies(device, shape, dtype)


@pytest.mark.parametrize("num_pairs", [0, 3])
def test_nothing_to_copy(triton_device: TritonDevice, num_pairs: int) -> None:
    nothing = torch.full((num_pairs,), -1)
    with triton_device() as device:
        caches = torch.ones(2, 1, 16, 1, 8, device=device)
        copy_kv(caches, nothing.to(device), nothing.to(device))
        assert bool((caches == 1.0).all())


@pytest.mark.gpu
def test_captured_in_a_graph() -> None:
    """A replay copies what the pairs are by then."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    device = torch.device("cuda")
    caches = torch.arange(4 * 48 * 8, dtype=torch.float32, device=device).view(4, 3, 16, 1, 8)
    sources, destinations = torch.full((4,), -1, device=device), torch.full((4,), -1, device=device)
    copy_kv(caches, sources, destinations)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy_kv(caches, sources, destinations)
    expected = caches.clone().flatten(1, 2)
    expected[:, 40] = expected[:, 3]
    sources[2], destinations[2] = 3, 40
    graph.replay()
    assert torch.equal(caches.flatten(1, 2), expected)
