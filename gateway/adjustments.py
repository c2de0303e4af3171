"""What the gateway takes otherwise than a request says, and what it tells the client of it."""

from __future__ import annotations

from outrider.protocol.sampling_parameters import MIN_TEMPERATURE
from outrider.v1 import generation_pb2


def adjust(request: generation_pb2.GenerateRequest) -> list[generation_pb2.Adjustment]:
    """Change a request that has been checked into what will be done, and name each change."""
    adjustments = []
    sampling = request.sampling
    # A wire's float32 is a little less than the limit that a client wrote.
    if 0.0 < sampling.temperature < MIN_TEMPERATURE * (1 - 1e-6):
        detail = f"{sampling.temperature:g} was raised to {MIN_TEMPERATURE:g}"
        adjustments.append(generation_pb2.Adjustment(field="sampling.temperature", detail=detail))
        sampling.temperature = MIN_TEMPERATURE
    return adjustments
