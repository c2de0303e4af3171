"""What a page needs to draw where the time of one request went, from its trace.

A step of a sequence is: its verdict travels to the drafter, the drafter works, the drafts travel back, the sequence
waits for its turn, the target verifies. Times are seconds since the request's beginning.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from gateway.dashboard.span_store import Span, Trace

PHASES = ("admission", "tokenize", "queue", "prefill", "preempted", "recompute")
STEPS = ("verify_step", "verify_steps")
DRAFTS = ("draft ", "drafts ")
# A drafter's clock that is off by more than this is not believed: its work is drawn where the verifier waited for it.
CLOCK_SECONDS = 0.002

Json = dict[str, Any]


def summary(trace: Trace) -> Json | None:
    """One line about a request; None as long as it runs."""
    root = trace.root
    if root is None:
        return None
    attributes = root.attributes
    return {
        "trace_id": trace.trace_id,
        "request_id": attributes.get("gen_ai.response.id", ""),
        "model": attributes.get("gen_ai.request.model", ""),
        "time": root.start,
        "seconds": root.end - root.start,
        "status": attributes.get("rpc.response.status_code", ""),
        "num_prompt_tokens": attributes.get("gen_ai.usage.input_tokens", 0),
        "num_output_tokens": attributes.get("gen_ai.usage.output_tokens", 0),
        "time_to_first_token_seconds": attributes.get("outrider.time_to_first_token_seconds"),
        "verification": attributes.get("outrider.verification"),
        "acceptance_rate": attributes.get("outrider.acceptance_rate"),
        "mean_acceptance_length": attributes.get("outrider.mean_acceptance_length"),
        "client_wait_seconds": attributes.get("outrider.client_wait_seconds"),
    }


def timeline(trace: Trace) -> Json | None:
    """Everything about a request; None as long as it runs."""
    root, found = trace.root, summary(trace)
    if root is None or found is None:
        return None
    spans = sorted(trace.spans, key=lambda span: span.start)
    zero = root.start
    steps = _steps(spans, zero)
    return {
        **found,
        "phases": [
            {
                "kind": span.name,
                "start": span.start - zero,
                "end": span.end - zero,
                "attributes": _shown(span.attributes),
            }
            for span in spans
            if span.name in PHASES
        ],
        "steps": steps,
        # What the drafter says itself; on a clock of its own where it runs on another machine.
        "drafts": [
            {
                "start": span.start - zero,
                "end": span.end - zero,
                "position": span.attributes.get("outrider.position"),
                "num_draft_tokens": span.attributes.get("outrider.num_draft_tokens", 0),
                "num_steps": span.attributes.get("outrider.num_steps", 1),
            }
            for span in spans
            if span.name.startswith(DRAFTS)
        ],
        "events": sorted(_events(spans, zero), key=lambda event: event["time"]),
        "totals": _totals(root.end - zero, spans, steps),
        "num_spans": len(spans),
        "num_dropped_spans": trace.num_dropped,
    }


def _steps(spans: Iterable[Span], zero: float) -> list[Json]:
    verified = [span for span in spans if span.name in STEPS]
    drafts = {span.attributes.get("outrider.position"): span for span in spans if span.name.startswith("draft ")}
    prefills = [span for span in spans if span.name == "prefill"]
    return [
        _step(before, span, drafts.get(span.attributes.get("outrider.position")), zero)
        for before, span in itertools.pairwise([*(prefills[-1:] or verified[:1]), *verified])
    ]


def _step(before: Span, span: Span, draft: Span | None, zero: float) -> Json:
    numbers = span.attributes
    wait, drafting = numbers.get("outrider.draft_wait_seconds", 0.0), numbers.get("outrider.draft_seconds", 0.0)
    step: Json = {
        "position": numbers.get("outrider.position"),
        "num_steps": numbers.get("outrider.num_steps", 1),
        "start": span.start - zero,
        "end": span.end - zero,
        "verify_seconds": numbers.get("outrider.busy_seconds", span.end - span.start),
        "num_draft_tokens": numbers.get("outrider.num_draft_tokens", 0),
        "num_accepted_tokens": numbers.get("outrider.num_accepted_tokens", 0),
        "draft_seconds": drafting,
        "wire_seconds": max(wait - drafting, 0.0),
        "turn_seconds": numbers.get("outrider.turn_wait_seconds", 0.0),
        "batch_size": numbers.get("outrider.batch_size"),
        "num_other_prefill_tokens": numbers.get("outrider.num_other_prefill_tokens", 0),
        "slowest_step_seconds": numbers.get("outrider.slowest_step_seconds"),
        "draft": None,
        "wire": [],
    }
    if step["num_steps"] > 1 or not wait:
        return step
    asked, arrived = before.end, span.start - numbers.get("outrider.turn_wait_seconds", 0.0)
    wire = wait - drafting
    if draft is not None and asked - CLOCK_SECONDS <= draft.start <= draft.end <= arrived + CLOCK_SECONDS:
        start, end = draft.start, draft.end
    else:
        # Nothing is known, or is believed, but how long it all took.
        start = asked + wire / 2
        end = start + drafting
        step["draft"] = [start - zero, end - zero]
    back = min(max(arrived - end, 0.0), wire)
    hops = [(start - (wire - back), start), (arrived - back, arrived)]
    step["wire"] = [[first - zero, last - zero] for first, last in hops if last > first]
    return step


def _totals(seconds: float, spans: Iterable[Span], steps: Iterable[Json]) -> Json:
    """Where the time went, in parts that add up to all of it."""
    totals = dict.fromkeys(PHASES, 0.0)
    for span in spans:
        if span.name in totals:
            totals[span.name] += span.end - span.start
    steps = list(steps)
    for name in ("verify", "draft", "wire", "turn"):
        totals[name] = sum(step[f"{name}_seconds"] for step in steps)
    totals["other"] = max(0.0, seconds - sum(totals.values()))
    return totals


def _events(spans: Iterable[Span], zero: float) -> Iterable[Json]:
    seen = set()
    for span in spans:
        for event in span.events:
            # A fallback stands in the spans of both services.
            key = (event.name, event.attributes.get("outrider.fallback.reason", event.time))
            if key not in seen:
                seen.add(key)
                yield {
                    "name": event.name.removeprefix("outrider."),
                    "time": event.time - zero,
                    "attributes": _shown(event.attributes),
                }


def _shown(attributes: Mapping[str, Any]) -> Json:
    return {key.removeprefix("outrider."): value for key, value in attributes.items() if value not in ("", None)}
