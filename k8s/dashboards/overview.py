"""Traffic, latency, errors and saturation: whether anybody has to look further."""

from __future__ import annotations

from k8s.dashboards.grafana import Dashboard, Panel, Query, Row, mean, quantiles, rate, selected, total

SERVICES = 'job=~"gateway|verifier|drafter"'
# What ends a request and is the services' own fault.
FAULTS = 'reason=~"unknown|deadline_exceeded|unimplemented|internal|unavailable|data_loss"'
USED = 'state="used"'

TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            "Requests",
            "How requests end: with a finish reason, or with a gRPC status.",
            [
                Query(
                    rate("outrider_gateway_requests_ended_total", "reason")
                    + " > 0 or "
                    + rate("outrider_gateway_requests_ended_total"),
                    "{{reason}}",
                )
            ],
            unit="reqps",
            is_stacked=True,
        ),
        Panel(
            "Tokens to clients",
            "By origin: accepted draft tokens, recovered and bonus tokens of the target, plain steps.",
            [Query(rate("outrider_gateway_tokens_total", "origin"), "{{origin}}")],
            unit="tokens/s",
            is_stacked=True,
        ),
        Panel(
            "Prompt tokens",
            "Sent to verifiers by the gateways, and computed by the verifiers: more where sequences were preempted.",
            [
                Query(rate("outrider_gateway_prompt_tokens_total"), "sent"),
                Query(rate("outrider_verifier_prefill_tokens_total"), "computed"),
            ],
            unit="tokens/s",
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "From the arrival of a request to its first token.",
            quantiles("gen_ai_server_time_to_first_token_seconds"),
            unit="s",
        ),
        Panel(
            "Time per output token",
            "For each token after the first, on average over a request.",
            quantiles("gen_ai_server_time_per_output_token_seconds"),
            unit="s",
        ),
        Panel(
            "Request duration",
            "From the arrival of a request to its end.",
            quantiles("gen_ai_server_request_duration_seconds"),
            unit="s",
        ),
        Panel(
            "Before the first token",
            "Where requests wait: for a place at the gateway, for one at the verifier, for their prompt.",
            [
                Query(mean("outrider_gateway_queue_duration_seconds"), "gateway's queue"),
                Query(mean("outrider_verifier_queue_duration_seconds"), "verifier's queue"),
                Query(mean("outrider_verifier_prefill_duration_seconds"), "prefill"),
            ],
            unit="s",
            is_stacked=True,
        ),
    ),
)

ERRORS = Row(
    "Errors",
    (
        Panel(
            "Failed requests",
            "Share of the requests that ended by a fault of the services.",
            [
                Query(
                    f"{rate('outrider_gateway_requests_ended_total', where=FAULTS)}"
                    f" / ({rate('outrider_gateway_requests_ended_total')} > 0)",
                    "failed",
                )
            ],
            unit="percentunit",
        ),
        Panel(
            "Refused requests",
            "Told to come again later, by reason.",
            [Query(rate("outrider_gateway_requests_refused_total", "reason"), "{{reason}}")],
            unit="reqps",
            is_stacked=True,
        ),
        Panel(
            "Fallbacks",
            "Requests that went on without a drafter, by reason.",
            [Query(rate("outrider_gateway_fallbacks_total", "reason"), "{{reason}}")],
            unit="reqps",
            is_stacked=True,
        ),
    ),
)

SATURATION = Row(
    "Saturation",
    (
        Panel(
            "Places at the gateways",
            "Requests that run and that wait, and how many may run at once.",
            [
                Query(total("outrider_gateway_requests_running"), "running"),
                Query(total("outrider_gateway_requests_waiting"), "waiting"),
                Query(total("outrider_gateway_requests_limit"), "limit"),
            ],
        ),
        Panel(
            "Sequences at the verifiers",
            "That run and that wait, and how many may run at once.",
            [
                Query(total("outrider_verifier_sequences_running"), "running"),
                Query(total("outrider_verifier_sequences_waiting"), "waiting"),
                Query(total("outrider_verifier_sequences_limit"), "limit"),
            ],
        ),
        Panel(
            "KV cache in use",
            "Share of the blocks of all pods.",
            [
                Query(
                    total(f"outrider_{pool}_kv_blocks", where=USED) + " / " + total(f"outrider_{pool}_kv_blocks"), pool
                )
                for pool in ("verifier", "drafter")
            ],
            unit="percentunit",
        ),
        Panel(
            "Cores in use",
            "CPU time of each service.",
            [Query(rate("process_cpu_seconds_total", "job", where=SERVICES), "{{job}}")],
        ),
        Panel(
            "Memory",
            "Resident memory of the largest process of each service.",
            [Query(f"max by (job) ({selected('process_resident_memory_bytes', SERVICES)})", "{{job}}")],
            unit="bytes",
        ),
    ),
)

OVERVIEW = Dashboard(
    "outrider-overview",
    "Outrider / Overview",
    "Traffic, latency, errors and saturation of gateways, verifiers and drafters.",
    (TRAFFIC, LATENCY, ERRORS, SATURATION),
)
