"""Every Prometheus metric of ours, once: registration, README and tests read this."""

from __future__ import annotations

from vericache_sglang.telemetry.cache_metrics import CACHE
from vericache_sglang.telemetry.metric import Metric, counter, gauge, histogram

ACCEPTED = histogram(
    "verification_accepted_tokens", "Drafts accepted by one verification."
)
WIDTH = histogram(
    "verification_width_tokens", "Tokens one verification runs: its drafts and one."
)
BURST = histogram(
    "burst_tokens",
    "Tokens a drafting request emits at once; plain rows emit one at a time.",
)

ACCEPTANCE = (
    counter("drafted_tokens", "tokens", "drafted", "Tokens drafted and verified."),
    counter("accepted_tokens", "tokens", "accepted", "Drafts accepted."),
    counter("verifications", "verifications", "rounds", "Rounds: drafts verified."),
    gauge(
        "mean_accepted_tokens",
        "tokens",
        "mean_accepted",
        "Accepted drafts of a verification, mean since the start.",
    ),
    gauge(
        "acceptance_prior_ratio",
        "ratio",
        "acceptance_prior",
        "Chance of a draft of a request nobody has verified yet, as assumed.",
    ),
    ACCEPTED,
    WIDTH,
    BURST,
)

ROUNDS = (
    counter("iterations", "iterations", "iterations", "Decode iterations."),
    counter(
        "mixed_iterations",
        "iterations",
        "mixed_iterations",
        "Forwards with drafting and verifying rows.",
    ),
    counter(
        "eager_forwards",
        "forwards",
        "eager_forwards",
        "Decodes and verifications that no CUDA graph serves, where there are graphs.",
    ),
    Metric(
        "vericache_rows_total",
        "counter",
        "rows",
        "Rows of decode forwards, by what they did.",
        (("draft", "draft_rows"), ("verify", "verify_rows"), ("plain", "plain_rows")),
        label="phase",
    ),
    counter(
        "stalled_rows",
        "rows",
        "waits",
        "Rows left out of a forward: a late reload, or no free verify row.",
    ),
    Metric(
        "vericache_slips_total",
        "counter",
        "row iterations",
        "Iterations by which verifications ran later than reserved.",
        (("", "slips"),),
        rings=True,
    ),
    Metric(
        "vericache_unplaced_rounds",
        "gauge",
        "rounds",
        "Rounds that wait for a reservation.",
        (("", "unplaced_rounds"),),
        rings=True,
    ),
    Metric(
        "vericache_ring_reserved_ratio",
        "gauge",
        "ratio",
        "Part of a ring's horizon that is reserved.",
        (
            ("link", "ring_link_reserved"),
            ("staging", "ring_staging_reserved"),
            ("verify", "ring_verify_reserved"),
        ),
        label="ring",
        rings=True,
    ),
)

RESIDENCY = (
    gauge("running_requests", "requests", "running", "Requests past their prefill."),
    gauge(
        "drafting_requests",
        "requests",
        "requests_drafting",
        "Requests whose prompt is split in a draft part and a complement.",
    ),
    Metric(
        "vericache_requests",
        "gauge",
        "requests",
        "Requests that may be drafted for, by residency; plain ones are on the device.",
        (
            ("device", "requests_device"),
            ("host", "requests_host"),
            ("parked", "requests_parked"),
        ),
        label="residency",
    ),
    Metric(
        "vericache_moves_total",
        "counter",
        "moves",
        "Changes of residency made.",
        (
            ("split", "splits"),
            ("unsplit", "unsplits"),
            ("offload", "offloads"),
            ("pin", "pins"),
            ("park", "parks"),
            ("resume", "resumes"),
        ),
        label="move",
    ),
    counter(
        "refused_moves",
        "moves",
        "refused_moves",
        "Moves put off for lack of device or host memory.",
    ),
    counter(
        "steps_aside",
        "requests",
        "steps_aside",
        "Requests given back to plain decoding, as drafting did not pay.",
    ),
    counter("joins", "rows", "joins", "Finished rows made whole for the prefix tree."),
    counter(
        "reprefills",
        "requests",
        "reprefills",
        "Requests prefilled again because their complement was lost.",
    ),
)

MEMORY = (
    gauge("kept_slots", "KV slots", "kept_slots", "Copies of kept prompt tokens."),
    gauge(
        "staging_slots", "KV slots", "staging_slots", "Staging slots that are taken."
    ),
    gauge(
        "staging_capacity_slots",
        "KV slots",
        "staging_tokens",
        "Slots of the staging region.",
    ),
    gauge(
        "staging_bytes", "bytes", "staging_bytes", "Bytes of the staging region taken."
    ),
    gauge("host_bytes", "bytes", "host_used_bytes", "Host memory taken by KV."),
    gauge(
        "host_pinned_bytes",
        "bytes",
        "host_pinned_bytes",
        "Of it, what running requests need; cached prefixes make way for the rest.",
    ),
    gauge(
        "host_budget_bytes", "bytes", "host_budget_bytes", "Host memory KV may take."
    ),
)

LINK = (
    counter(
        "staged_bytes", "bytes", "staged_bytes", "Bytes copied into the staging region."
    ),
    counter("offloaded_bytes", "bytes", "offloaded_bytes", "Bytes copied to the host."),
    counter(
        "reload_seconds", "seconds", "stage_seconds", "Time reloads took on the link."
    ),
    counter(
        "shared_reloads",
        "reloads",
        "shared_reloads",
        "Reloads saved: another request had staged the same complement.",
    ),
    counter(
        "failed_reloads",
        "reloads",
        "failed_reloads",
        "Copies into the staging region that failed.",
    ),
    counter(
        "early_verifications",
        "verifications",
        "early_verifications",
        "Verifications launched while their complement was still arriving.",
    ),
    counter(
        "thrown_verifications",
        "verifications",
        "thrown_verifications",
        "Of these, thrown away and made again: the rest of it never arrived.",
    ),
    counter(
        "stood_still_seconds",
        "seconds",
        "stood_still_seconds",
        "Time forwards waited for layers that were still arriving.",
    ),
    Metric(
        "vericache_link_bytes_per_second",
        "gauge",
        "bytes per second",
        "What the last copies over the host link achieved.",
        (("in", "link_in_bytes_per_s"), ("out", "link_out_bytes_per_s")),
        label="direction",
    ),
    Metric(
        "vericache_link_estimate_bytes_per_second",
        "gauge",
        "bytes per second",
        "Speed of the host link for large copies, as estimated.",
        (("in", "link_in_large_bytes_per_s"), ("out", "link_out_large_bytes_per_s")),
        label="direction",
    ),
    gauge(
        "iteration_estimate_seconds",
        "seconds",
        "iteration_s",
        "Time of a decode iteration, as estimated.",
    ),
    gauge(
        "kv_read_estimate_bytes_per_second",
        "bytes per second",
        "kv_read_bytes_per_s",
        "Rate at which forwards read KV, as estimated.",
    ),
)

SHADOW = (
    counter(
        "shadow_checks",
        "requests",
        "shadow_checks",
        "Finished requests decoded again plainly and compared.",
    ),
    counter(
        "shadow_mismatches",
        "requests",
        "shadow_mismatches",
        "Compared requests whose tokens differ; any is a bug.",
    ),
    counter(
        "shadow_dropped",
        "requests",
        "shadow_dropped",
        "Sampled requests left unchecked: the queue was full.",
    ),
    gauge(
        "shadow_pending",
        "requests",
        "shadow_pending",
        "Requests that wait for a check.",
    ),
)

TABLE: tuple[Metric, ...] = (
    *ACCEPTANCE,
    *ROUNDS,
    *RESIDENCY,
    *MEMORY,
    *CACHE,
    *LINK,
    *SHADOW,
)
"""Every metric, in the README's order."""


def markdown() -> str:
    """Return the table as Markdown, one line per metric."""
    lines = ["| Metric | Type | Unit | Label | What it says |", "|---|---|---|---|---|"]
    for metric in TABLE:
        values = ", ".join(value for value, _ in metric.sources)
        label = f"`{metric.label}`: {values}" if metric.label else "-"
        lines.append(
            f"| `{metric.name}` | {metric.kind} | {metric.unit} | {label} | "
            f"{metric.help} |"
        )
    return "\n".join(lines)
