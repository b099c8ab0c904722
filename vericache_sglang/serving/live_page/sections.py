"""The parts of the page: one scheduler's figures, lanes, rings and memory."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import TYPE_CHECKING

from vericache_sglang.serving.live_page.charts import area, bar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vericache_sglang.serving.live_page.reading import Lane, Reading, RingLevels

PHASES: Mapping[str, str] = {
    "draft": "drafting",
    "verify": "verifying",
    "wait": "waiting",
    "plain": "plain",
    "parked": "parked",
}
"""Phase -> how the page calls a request in it; in the order of the legend."""

PLACES: Mapping[str, str] = {
    "device": "KV on the device",
    "host": "complement on the host",
    "parked": "all KV on the host",
}

RINGS: Mapping[str, tuple[str, str]] = {
    "link": ("Host link", "of an iteration's link time"),
    "staging": ("Staging region", "of {limit:,.0f} slots"),
    "verify": ("Verifications", "of {limit:,.0f} rows"),
}
"""Ring -> its heading, and what the share is of."""

NOTHING = "&ndash;"

MIB = 1 << 20


def section(reading: Reading) -> str:
    """Render one scheduler."""
    if not reading.enabled:
        return (
            '<p class="state">VeriCache is off in this server: every request is '
            "decoded plainly, by SGLang alone.</p>"
        )
    parts = [
        f'<p class="state">{sentence(reading)}</p>',
        headline(reading),
        lanes(reading),
        rings(reading),
        memory(reading),
    ]
    return "\n".join(part for part in parts if part)


def sentence(reading: Reading) -> str:
    """Say in words what the scheduler does now."""
    running = int(reading.figures.get("running", 0))
    if not running:
        return "No request is running."
    runs = f"{_count(running, 'request runs', 'requests run')}"
    if not reading.figures.get("requests_drafting", 0):
        return (
            f"{runs}, decoded plainly: nothing is split, because prompts are below "
            "the minimum, drafting has not begun, or plain decoding is predicted to "
            "be faster."
        )
    phases = Counter(lane.phase for lane in reading.lanes)
    doing = [
        f"{phases[phase]} {name}" for phase, name in PHASES.items() if phases[phase]
    ]
    return f"{runs}: {', '.join(doing)}." if doing else f"{runs}."


def headline(reading: Reading) -> str:
    """Render the numbers one looks at first; those since the start say so."""
    tiles = "".join(
        f'<div class="tile{alarm}"><dt>{label}</dt><dd>{value}</dd>'
        f'<dd class="note">{note}</dd></div>'
        for label, value, note, alarm in _tiles(reading)
    )
    return f'<dl class="tiles">{tiles}</dl>'


def _tiles(reading: Reading) -> Iterator[tuple[str, str, str, str]]:
    """Yield (label, value, note, class with a leading blank or "")."""
    get = reading.figures.get
    drafted, rounds = get("drafted", 0), get("rounds", 0)
    yield "Running", _whole(get("running")), "requests", ""
    yield "Split to draft", _whole(get("requests_drafting")), "requests", ""
    rate = reading.tokens_per_s
    yield (
        "Tokens per second",
        NOTHING if rate is None else f"{rate:,.0f}",
        "decoded, last 10 s",
        "",
    )
    accepted = f"{get('accepted', 0) / drafted:.1%}" if drafted else NOTHING
    yield "Drafts accepted", accepted, f"of {drafted:,.0f} since start", ""
    per_round = f"{get('accepted', 0) / rounds:.1f}" if rounds else NOTHING
    yield "Accepted per verification", per_round, f"{rounds:,.0f} since start", ""
    yield "Steps aside", _whole(get("steps_aside")), "back to plain decoding", ""
    checks, wrong = get("shadow_checks", 0), get("shadow_mismatches", 0)
    yield (
        "Shadow mismatches",
        f"{wrong:,.0f}" if checks else NOTHING,
        f"in {_count(int(checks), 'check', 'checks')}" if checks else "no checks made",
        " alarm" if wrong else "",
    )


def lanes(reading: Reading) -> str:
    """Render one lane per request, in the order the scheduler has them."""
    if not reading.lanes:
        return ""
    phases = Counter(lane.phase for lane in reading.lanes)
    legend = "".join(
        f'<li class="{phase}"><i></i>{name} <b>{phases[phase]}</b></li>'
        for phase, name in PHASES.items()
    )
    running = int(reading.figures.get("running", 0))
    more = ""
    if running > len(reading.lanes):
        words = f"The first {len(reading.lanes)} of {running:,} are shown."
        more = f'<p class="note">{words}</p>'
    rows = "\n".join(map(_lane, reading.lanes))
    return (
        f'<h3>Requests</h3><ul class="legend">{legend}</ul>{more}'
        f'<ol class="lanes">\n{rows}\n</ol>'
    )


def _lane(lane: Lane) -> str:
    facts = [f"prompt {lane.prompt:,}", f"emitted {lane.emitted:,}"]
    facts.append(escape(PLACES.get(lane.residency, lane.residency)))
    if lane.most:
        facts.append(f"acceptance {lane.acceptance:.0%}")
    facts = [f"<span>{fact}</span>" for fact in facts]
    rid, phase = escape(lane.rid), escape(lane.phase)
    return (
        f'<li class="lane {phase}"><span class="rid" title="{rid}">{rid}</span>'
        f'<span class="phase">{escape(PHASES.get(lane.phase, lane.phase))}</span>'
        f'<span class="progress">{bar(_progress(lane))}'
        f'<span class="words">{_words(lane)}</span></span>'
        f'<span class="facts">{"".join(facts)}</span></li>'
    )


def _progress(lane: Lane) -> float:
    """Return how far a request is on the way to its verification, in [0, 1]."""
    if lane.phase == "verify":
        return 1.0
    return lane.drafts / lane.most if lane.most else 0.0


def _words(lane: Lane) -> str:
    if lane.phase == "plain":
        return "a token each iteration"
    if lane.phase == "verify":
        return "drafts verified"
    if lane.phase == "parked":
        return "waits for room"
    if lane.most:
        return f"{lane.drafts:,} of {lane.most:,} drafts"
    return "to be verified" if lane.drafts else "not drafting"


def rings(reading: Reading) -> str:
    """Render what is reserved in the coming iterations, one chart per ring."""
    if not reading.rings:
        return ""
    charts = "".join(map(_ring, reading.rings))
    return f'<h3>Reserved ahead</h3><div class="rings">{charts}</div>'


def _ring(ring: RingLevels) -> str:
    title, unit = RINGS.get(ring.name, (ring.name, "of {limit:,.0f}"))
    shares = ring.shares()
    mean = sum(shares) / len(shares) if shares else 0.0
    words = f"{mean:.0%} on average, {max(shares, default=0.0):.0%} at most"
    label = f"{title}: {words}, of {len(shares):,} iterations"
    return (
        f'<figure class="ring"><figcaption><b>{escape(title)}</b> '
        f'<span class="words">{words}</span> '
        f'<span class="note">{unit.format(limit=ring.limit)}</span></figcaption>'
        f"{area(shares, escape(label))}"
        '<p class="axis"><span>now</span>'
        f"<span>in {len(shares):,} iterations</span></p>"
        "</figure>"
    )


def memory(reading: Reading) -> str:
    """Render who holds what: requests by residency, and what VeriCache has taken."""
    get = reading.figures.get
    rows = []
    for kind, where in PLACES.items():
        count = get(f"requests_{kind}")
        if count is not None:
            words = f"{_count(int(count), 'request', 'requests')}"
            share = count / max(1.0, get("running", 0))
            rows.append((where, share, words))
    held, budget = get("host_bytes", 0) / MIB, get("host_budget_bytes", 0) / MIB
    if budget:
        rows.append(("Host memory", held / budget, f"{held:,.1f} of {budget:,.0f} MiB"))
    staged, region = get("staging_slots", 0), get("staging_tokens", 0)
    if region:
        rows.append(
            ("Staging region", staged / region, f"{staged:,.0f} of {region:,.0f} slots")
        )
    if not rows:
        return ""
    lines = "".join(
        f'<li><span class="what">{what[0].upper()}{what[1:]}</span>{bar(share)}'
        f'<span class="words">{words}</span></li>'
        for what, share, words in rows
    )
    return f'<h3>Memory</h3><ul class="memory">{lines}</ul>'


def _whole(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
