"""Every Prometheus metric of ours, once: registration, README and tests read this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

Sources = tuple[tuple[str, str], ...]
"""(label value, key of the worker's report); "" stands for no label."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family.

    Attributes:
        name: Its Prometheus name; counters end in ``_total``.
        kind: Its Prometheus type.
        unit: What one is of, or "ratio" (0 to 1).
        help: One sentence.
        sources: Where the values come from; empty for a histogram, which is fed from
            the rows of iterations.
        label: Name of the label of its own; "" for none.
        rings: Only pacing over reserve rings (``staggered``) has it.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    sources: Sources = ()
    label: str = ""
    rings: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the worker's report that it reads."""
        return tuple(key for _, key in self.sources)

    @property
    def documentation(self) -> str:
        """The help text, unit included."""
        return f"{self.help} Unit: {self.unit}."


def _one(kind: Kind, name: str, unit: str, key: str, text: str) -> Metric:
    return Metric(f"vericache_{name}", kind, unit, text, (("", key),))


def _counter(name: str, unit: str, key: str, text: str) -> Metric:
    return _one("counter", f"{name}_total", unit, key, text)


def _gauge(name: str, unit: str, key: str, text: str) -> Metric:
    return _one("gauge", name, unit, key, text)


def _histogram(name: str, text: str) -> Metric:
    return Metric(f"vericache_{name}", "histogram", "tokens", text)


ACCEPTED = _histogram(
    "verification_accepted_tokens", "Drafts accepted by one verification."
)
WIDTH = _histogram(
    "verification_width_tokens", "Tokens one verification runs: its drafts and one."
)
BURST = _histogram(
    "burst_tokens",
    "Tokens a drafting request emits at once; plain rows emit one at a time.",
)

ACCEPTANCE = (
    _counter("drafted_tokens", "tokens", "drafted", "Tokens drafted and verified."),
    _counter("accepted_tokens", "tokens", "accepted", "Drafts accepted."),
    _counter("verifications", "verifications", "rounds", "Rounds: drafts verified."),
    _gauge(
        "mean_accepted_tokens",
        "tokens",
        "mean_accepted",
        "Accepted drafts of a verification, mean since the start.",
    ),
    _gauge(
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
    _counter("iterations", "iterations", "iterations", "Decode iterations."),
    _counter(
        "mixed_iterations",
        "iterations",
        "mixed_iterations",
        "Forwards with drafting and verifying rows.",
    ),
    Metric(
        "vericache_rows_total",
        "counter",
        "rows",
        "Rows of decode forwards, by what they did.",
        (("draft", "draft_rows"), ("verify", "verify_rows"), ("plain", "plain_rows")),
        label="phase",
    ),
    _counter(
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
    _gauge("running_requests", "requests", "running", "Requests past their prefill."),
    _gauge(
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
    _counter(
        "refused_moves",
        "moves",
        "refused_moves",
        "Moves put off for lack of device or host memory.",
    ),
    _counter(
        "steps_aside",
        "requests",
        "steps_aside",
        "Requests given back to plain decoding, as drafting did not pay.",
    ),
    _counter("joins", "rows", "joins", "Finished rows made whole for the prefix tree."),
    _counter(
        "reprefills",
        "requests",
        "reprefills",
        "Requests prefilled again because their complement was lost.",
    ),
)

MEMORY = (
    _gauge("kept_slots", "KV slots", "kept_slots", "Copies of kept prompt tokens."),
    _gauge(
        "staging_slots", "KV slots", "staging_slots", "Staging slots that are taken."
    ),
    _gauge(
        "staging_capacity_slots",
        "KV slots",
        "staging_tokens",
        "Slots of the staging region.",
    ),
    _gauge(
        "staging_bytes", "bytes", "staging_bytes", "Bytes of the staging region taken."
    ),
    _gauge("host_bytes", "bytes", "host_bytes", "Host memory taken by KV."),
    _gauge(
        "host_budget_bytes", "bytes", "host_budget_bytes", "Host memory KV may take."
    ),
)

LINK = (
    _counter(
        "staged_bytes", "bytes", "staged_bytes", "Bytes copied into the staging region."
    ),
    _counter(
        "offloaded_bytes", "bytes", "offloaded_bytes", "Bytes copied to the host."
    ),
    _counter(
        "reload_seconds", "seconds", "stage_seconds", "Time reloads took on the link."
    ),
    _counter(
        "shared_reloads",
        "reloads",
        "shared_reloads",
        "Reloads saved: another request had staged the same complement.",
    ),
    _counter(
        "failed_reloads",
        "reloads",
        "failed_reloads",
        "Copies into the staging region that failed.",
    ),
    Metric(
        "vericache_link_estimate_bytes_per_second",
        "gauge",
        "bytes per second",
        "Speed of the host link for large copies, as estimated.",
        (("in", "link_in_large_bytes_per_s"), ("out", "link_out_large_bytes_per_s")),
        label="direction",
    ),
    _gauge(
        "iteration_estimate_seconds",
        "seconds",
        "iteration_s",
        "Time of a decode iteration, as estimated.",
    ),
    _gauge(
        "kv_read_estimate_bytes_per_second",
        "bytes per second",
        "kv_read_bytes_per_s",
        "Rate at which forwards read KV, as estimated.",
    ),
)

SHADOW = (
    _counter(
        "shadow_checks",
        "requests",
        "shadow_checks",
        "Finished requests decoded again plainly and compared.",
    ),
    _counter(
        "shadow_mismatches",
        "requests",
        "shadow_mismatches",
        "Compared requests whose tokens differ; any is a bug.",
    ),
    _counter(
        "shadow_dropped",
        "requests",
        "shadow_dropped",
        "Sampled requests left unchecked: the queue was full.",
    ),
    _gauge(
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
