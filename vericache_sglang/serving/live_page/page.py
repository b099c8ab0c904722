"""The whole page around the sections, and the headers it is sent with."""

from __future__ import annotations

import base64
import hashlib
import time
from html import escape
from typing import TYPE_CHECKING

from vericache_sglang.serving.live_page.script import SCRIPT
from vericache_sglang.serving.live_page.sections import section
from vericache_sglang.serving.live_page.style import STYLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vericache_sglang.serving.live_page.reading import Reading


def body(readings: Sequence[Reading], now: float) -> str:
    """Render what changes: one section per scheduler.

    Args:
        readings: One per scheduler.
        now: Seconds since the epoch.
    """
    several = len(readings) > 1
    model = readings[0].model if readings else ""
    clock = time.strftime("%H:%M:%S", time.gmtime(now))
    parts = [f'<p class="note head"><span>{escape(model)}</span> {clock} UTC</p>']
    for i, reading in enumerate(readings, 1):
        title = f"<h2>Scheduler {i} of {len(readings)}</h2>" if several else ""
        parts.append(
            f'<section class="scheduler">{title}\n{section(reading)}</section>'
        )
    return "\n".join(parts)


def failure(message: str) -> str:
    """Render why there is nothing to show."""
    return f'<p class="state failure">{escape(message)}</p>'


def page(content: str) -> str:
    """Put ``content`` (markup) into a complete page.

    With JavaScript it replaces its own content every second, without it the browser
    loads it again.
    """
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>VeriCache</title>
<noscript><meta http-equiv="refresh" content="2"></noscript>
<style>{STYLE}</style>
</head>
<body data-updates="0">
<h1>VeriCache</h1>
<p id="stale" class="state failure" role="status" hidden></p>
<main id="live">
{content}
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _digest(text: str) -> str:
    sha = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(sha).decode()}'"


HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    # Request ids are the clients' words: nothing runs but what stands above.
    "Content-Security-Policy": (
        f"default-src 'none'; style-src {_digest(STYLE)}; "
        f"script-src {_digest(SCRIPT)}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}
"""Sent with every answer."""
