"""Which model of a local cluster runs on what, and how those on one GPU share its memory."""

from __future__ import annotations

import pytest

from outrider import devices
from outrider.devices import Devices, find_devices


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "num_drafters", "expected"),
    [
        (("auto", "auto"), 0, 2, Devices("cpu", ("cpu", "cpu"))),
        (("auto", "auto"), 1, 1, Devices("cuda:0", ("cuda:0",))),
        (("auto", "auto"), 2, 1, Devices("cuda:0", ("cuda:1",))),
        (("auto", "auto"), 8, 1, Devices("cuda:0", ("cuda:1",))),
        (("auto", "auto"), 3, 3, Devices("cuda:0", ("cuda:1", "cuda:2", "cuda:1"))),
        (("auto", "auto"), 8, 0, Devices("cuda:0", ())),
        (("cpu", "cpu"), 8, 1, Devices("cpu", ("cpu",))),
        (("cuda:3", "cuda:3"), 8, 1, Devices("cuda:3", ("cuda:3",))),
        (("cuda", "cuda:0"), 1, 1, Devices("cuda:0", ("cuda:0",))),
        (("cuda:1", "auto"), 3, 3, Devices("cuda:1", ("cuda:0", "cuda:2", "cuda:0"))),
        (("cpu", "auto"), 1, 1, Devices("cpu", ("cuda:0",))),
        (("auto", "cpu"), 2, 1, Devices("cuda:0", ("cpu",))),
    ],
)
async def test_who_gets_which_device(
    monkeypatch: pytest.MonkeyPatch, wanted: tuple[str, str], num_gpus: int, num_drafters: int, expected: Devices
) -> None:
    async def count() -> int:
        return num_gpus

    monkeypatch.setattr(devices, "_num_gpus", count)
    assert await find_devices(*wanted, num_drafters) == expected


@pytest.mark.parametrize(
    ("shared", "verifier", "drafters"),
    [
        (Devices("cpu", ("cpu", "cpu")), None, [None, None]),
        (Devices("cuda:0", ("cuda:1",)), None, [None]),
        (Devices("cuda:0", ("cuda:0",)), 0.8, [0.1]),
        (Devices("cuda:0", ("cuda:0", "cuda:0")), 0.8, [0.05, 0.05]),
        (Devices("cuda:0", ("cuda:1", "cuda:1", "cuda:2")), None, [0.45, 0.45, None]),
    ],
)
def test_who_shares_a_gpu_shares_its_memory(
    shared: Devices, verifier: float | None, drafters: list[float | None]
) -> None:
    """Catches two services that each size their cache as if they were alone on the GPU."""
    assert shared.verifier_memory == verifier
    assert [shared.drafter_memory(number) for number in range(len(drafters))] == drafters
