"""The pods of each pool: who is there, how full, how busy."""

from __future__ import annotations

from k8s.dashboards.grafana import Dashboard, Panel, Query, Row, mean, quantile, rate, selected, total
from k8s.dashboards.overview import SERVICES

MEMBERS = Row(
    "Members",
    (
        Panel(
            "Verifiers",
            "By state, as the gateway that sees the most of them sees them.",
            [Query(f"max by (state) ({selected('outrider_gateway_verifiers')})", "{{state}}")],
        ),
        Panel(
            "Drafters",
            "By state, as the gateway that sees the most of them sees them.",
            [Query(f"max by (state) ({selected('outrider_gateway_drafters')})", "{{state}}")],
        ),
        Panel(
            "Links between them",
            "From verifiers to drafters, by state.",
            [Query(total("outrider_verifier_drafters", "state"), "{{state}}")],
        ),
        Panel(
            "Sequences by pod",
            "Running at each verifier, open at each drafter.",
            [
                Query(total("outrider_verifier_sequences_running", "instance"), "verifier {{instance}}"),
                Query(total("outrider_drafter_sequences_open", "instance"), "drafter {{instance}}"),
            ],
        ),
    ),
)

CACHE = Row(
    "KV cache",
    (
        *(
            Panel(
                f"{pool.capitalize()}s' blocks",
                "Used and free.",
                [Query(total(f"outrider_{pool}_kv_blocks", "state"), "{{state}}")],
                is_stacked=True,
            )
            for pool in ("verifier", "drafter")
        ),
        Panel(
            "Preemptions",
            "Sequences that lost their blocks to older ones and are computed anew.",
            [Query(rate("outrider_verifier_preemptions_total", "instance"), "{{instance}}")],
        ),
    ),
)

STEPS = Row(
    "Verifiers' steps",
    (
        Panel(
            "Time by stage",
            "Mean of a step: choosing sequences, forward pass and sampling, verdicts, reports to gateways.",
            [Query(mean("outrider_verifier_step_duration_seconds", "stage"), "{{stage}}")],
            unit="s",
            is_stacked=True,
        ),
        Panel(
            "Busy",
            "Share of the time that the target model computes.",
            [
                Query(
                    rate("outrider_verifier_step_duration_seconds_sum", "instance", where='stage="verify"'),
                    "{{instance}}",
                )
            ],
            unit="percentunit",
        ),
        Panel(
            "Sequences in a step",
            "Batch size.",
            [
                Query(mean("outrider_verifier_batch_sequences"), "mean"),
                Query(quantile(0.95, "outrider_verifier_batch_sequences"), "p95"),
            ],
        ),
        Panel(
            "Tokens in a step",
            "Prompts fill what decoding leaves of the budget.",
            [Query(rate("outrider_verifier_batch_tokens_bucket", "le"))],
            kind="heatmap",
        ),
    ),
)

ROUNDS = Row(
    "Drafters' rounds",
    (
        Panel(
            "Time of a round",
            "For all sequences in it.",
            [
                Query(mean("outrider_drafter_step_duration_seconds"), "mean"),
                Query(quantile(0.95, "outrider_drafter_step_duration_seconds"), "p95"),
            ],
            unit="s",
        ),
        Panel(
            "Busy",
            "Share of the time that a drafter drafts.",
            [Query(rate("outrider_drafter_step_duration_seconds_sum", "instance"), "{{instance}}")],
            unit="percentunit",
        ),
        Panel(
            "Sequences in a round",
            "Batch size.",
            [
                Query(mean("outrider_drafter_batch_sequences"), "mean"),
                Query(quantile(0.95, "outrider_drafter_batch_sequences"), "p95"),
            ],
        ),
    ),
)

WIRE = Row(
    "Wire",
    tuple(
        Panel(
            f"{service.capitalize()}s",
            "Bytes of gRPC messages, by peer and direction.",
            [Query(rate(f"outrider_{service}_wire_bytes_total", "peer", "direction"), "{{peer}} {{direction}}")],
            unit="Bps",
        )
        for service in ("gateway", "verifier", "drafter")
    ),
)

GPUS = Row(
    "GPUs",
    (
        *(
            Panel(
                f"Memory of {pool}s",
                "Used and free, whoever holds it.",
                [Query(total(f"outrider_{pool}_gpu_memory_bytes", "instance", "state"), "{{instance}} {{state}}")],
                unit="bytes",
                source="GPU",
            )
            for pool in ("verifier", "drafter")
        ),
        Panel(
            "Utilization",
            "Share of the time that a GPU has work.",
            [Query("avg by (Hostname, gpu) (DCGM_FI_DEV_GPU_UTIL)", "{{Hostname}} {{gpu}}")],
            unit="percent",
            source="DCGM exporter",
        ),
        Panel(
            "Power",
            "What the GPUs draw.",
            [Query("avg by (Hostname, gpu) (DCGM_FI_DEV_POWER_USAGE)", "{{Hostname}} {{gpu}}")],
            unit="watt",
            source="DCGM exporter",
        ),
    ),
)

PROCESSES = Row(
    "Processes",
    (
        Panel(
            "Cores in use",
            "CPU time of each process; a gateway or an engine's thread cannot use more than one.",
            [Query(rate("process_cpu_seconds_total", "job", "instance", where=SERVICES), "{{job}} {{instance}}")],
        ),
        Panel(
            "Memory",
            "Resident memory.",
            [Query(selected("process_resident_memory_bytes", SERVICES), "{{job}} {{instance}}")],
            unit="bytes",
        ),
        Panel(
            "Tasks and files",
            "Tasks of the event loops, and open files: where something leaks, they grow.",
            [
                *(
                    Query(total(f"outrider_{service}_tasks", "instance"), f"{service} tasks {{{{instance}}}}")
                    for service in ("gateway", "verifier", "drafter")
                ),
                Query(selected("process_open_fds", SERVICES), "{{job}} files {{instance}}"),
            ],
        ),
    ),
)

POOLS = Dashboard(
    "outrider-pools",
    "Outrider / Pools",
    "KV cache, batches, steps, wire and GPUs of each pool.",
    (MEMBERS, CACHE, STEPS, ROUNDS, WIRE, GPUS, PROCESSES),
)
