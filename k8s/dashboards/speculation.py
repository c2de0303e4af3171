"""What the drafters are worth, and what keeps them from being worth more."""

from __future__ import annotations

from k8s.dashboards.grafana import Dashboard, Panel, Query, Row, mean, quantile, rate

DRAFTED = "outrider_verifier_draft_tokens_total"
ACCEPTED = "outrider_verifier_draft_accepted_total"
VERIFY = 'stage="verify"'


def share(part: str, whole: str) -> str:
    """A share of what there is; nothing where there is none."""
    return f"{part} / ({whole} > 0)"


ACCEPTANCE = Row(
    "Acceptance",
    (
        Panel(
            "Acceptance rate",
            "Accepted of the draft tokens that were verified.",
            [Query(share(rate(ACCEPTED), rate(DRAFTED)), "accepted")],
            unit="percentunit",
            kind="stat",
        ),
        Panel(
            "Mean acceptance length",
            "Tokens that a step commits to a sequence whose draft tokens it verifies; 1 would be no gain.",
            [Query(mean("outrider_verifier_acceptance_length"), "tokens")],
            kind="stat",
        ),
        Panel(
            "Acceptance by position",
            "Of the draft tokens at each place of a chain, 0 first.",
            [
                Query(
                    share(
                        rate("outrider_verifier_draft_accepted_per_position_total", "position"),
                        rate("outrider_verifier_draft_tokens_per_position_total", "position"),
                    ),
                    "{{position}}",
                )
            ],
            unit="percentunit",
            kind="bargauge",
        ),
        Panel(
            "Acceptance by drafter",
            "One that stands out has another model, or a fault.",
            [Query(share(rate(ACCEPTED, "drafter"), rate(DRAFTED, "drafter")), "{{drafter}}")],
            unit="percentunit",
        ),
        Panel(
            "Acceptance by rule",
            "Of greedy, rejection and coupled verification: coupling accepts a little less than rejection.",
            [Query(share(rate(ACCEPTED, "verification"), rate(DRAFTED, "verification")), "{{verification}}")],
            unit="percentunit",
        ),
    ),
)

LENGTHS = Row(
    "Tokens a step",
    (
        Panel(
            "Acceptance length",
            "How the tokens that a step commits to a sequence are distributed.",
            [Query(rate("outrider_verifier_acceptance_length_bucket", "le"))],
            kind="heatmap",
        ),
        Panel(
            "Tokens by origin",
            "What the verifiers commit.",
            [Query(rate("outrider_verifier_tokens_total", "origin"), "{{origin}}")],
            unit="tokens/s",
            is_stacked=True,
        ),
        Panel(
            "Draft tokens",
            "Expansions of draft trees, of which each brings one; verified; accepted.",
            [
                Query(rate("outrider_drafter_expansions_total"), "expanded"),
                Query(rate(DRAFTED), "verified"),
                Query(rate(ACCEPTED), "accepted"),
            ],
            unit="tokens/s",
        ),
    ),
)

TREE = Row(
    "Draft trees",
    (
        Panel(
            "Outcomes",
            "What the trees had for the last token of a step: behind an expanded child stands the next chain.",
            [Query(rate("outrider_verifier_tree_outcomes_total", "outcome"), "{{outcome}}")],
            is_stacked=True,
        ),
        Panel(
            "Drafted in vain",
            "Of the expansions that came, those that no committed token led over.",
            [
                Query(
                    "1 - "
                    + share(
                        rate("outrider_verifier_tree_expansions_total", where='state="walked"'),
                        rate("outrider_verifier_tree_expansions_total", where='state="received"'),
                    ),
                    "in vain",
                )
            ],
            unit="percentunit",
        ),
        Panel(
            "How far ahead",
            "Draft tokens at hand for a sequence when its step began.",
            [Query(rate("outrider_verifier_tree_chain_length_bucket", "le"))],
            kind="heatmap",
        ),
    ),
)

TIME = Row(
    "Time",
    (
        Panel(
            "Draft wait against verify time",
            "The network hides behind the target while sequences wait no longer for their drafts than a step takes.",
            [
                Query(quantile(part, histogram, where=where), f"{name} p{round(part * 100)}")
                for name, histogram, where in (
                    ("draft wait", "outrider_verifier_draft_wait_seconds", ""),
                    ("verify", "outrider_verifier_step_duration_seconds", VERIFY),
                )
                for part in (0.5, 0.95)
            ],
            unit="s",
        ),
        Panel(
            "Round trip by drafter",
            "In turns, from a verdict to the drafts that answer it, 95th percentile.",
            [Query(quantile(0.95, "outrider_verifier_drafter_round_trip_seconds", "drafter"), "{{drafter}}")],
            unit="s",
        ),
        Panel(
            "Drafting and the rest",
            "In turns: mean round trip, and of it the mean pass of drafting; the rest is network and waiting.",
            [
                Query(mean("outrider_verifier_drafter_round_trip_seconds"), "round trip"),
                Query(mean("outrider_drafter_step_duration_seconds"), "drafting"),
            ],
            unit="s",
        ),
    ),
)

LOSSES = Row(
    "Without a draft",
    (
        Panel(
            "Fallbacks",
            "Sequences that went on without a drafter, by reason.",
            [Query(rate("outrider_verifier_fallbacks_total", "reason"), "{{reason}}")],
            is_stacked=True,
        ),
        Panel(
            "Late drafts",
            "That a sequence gave up waiting for.",
            [Query(rate("outrider_verifier_draft_late_total", "instance"), "{{instance}}")],
        ),
        Panel(
            "Drafters' refusals",
            "Answers without drafts, by reason.",
            [Query(rate("outrider_drafter_refusals_total", "reason"), "{{reason}}")],
            is_stacked=True,
        ),
        Panel(
            "Bytes for an expansion",
            "What drafters send, for each expansion of a draft tree.",
            [
                Query(
                    share(
                        rate("outrider_drafter_wire_bytes_total", where='direction="sent"'),
                        rate("outrider_drafter_expansions_total"),
                    ),
                    "bytes",
                )
            ],
            unit="bytes",
        ),
    ),
)

SPECULATION = Dashboard(
    "outrider-speculation",
    "Outrider / Speculation",
    "Acceptance by position and by drafter, waits for drafts, fallbacks.",
    (ACCEPTANCE, LENGTHS, TREE, TIME, LOSSES),
)
