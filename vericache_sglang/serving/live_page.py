"""``GET /vericache``: a static page, and the JSON state that it draws once a second.

The routes belong to SGLang's application. With ``--api-key`` its middleware requires
the key in the ``Authorization`` header here too, as for every path except health,
readiness and metrics.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from starlette.responses import HTMLResponse, JSONResponse

from vericache_sglang.errors import VeriCacheError
from vericache_sglang.former_names import with_former_names

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from starlette.requests import Request

    from vericache_sglang.observability.guard import Guard

    States = Sequence[Mapping[str, Any]]

PATH = "/vericache"
STATE_PATH = "/vericache/state"
CACHE_PATH = "/vericache/cache"

KEY = "vericache"
"""Name of the worker's report in SGLang's state (patches: managers_scheduler)."""

TIMEOUT_S = 5.0
"""Timeout of a viewer's request for the schedulers' state, in seconds."""

FRESH_S = 0.5
"""Seconds for which one answer is cached for all viewers."""

TIERS = {
    "device": {
        "tokens": "cache_device_tokens",
        "draft_slots": "cache_draft_slots",
        "draft_slots_used": "cache_draft_slots_used",
        "evicted_tokens": "cache_evicted_device_tokens",
    },
    "host": {
        "tokens": "cache_host_tokens",
        "bytes": "cache_host_bytes",
        "residual_bytes": "cache_residual_bytes",
        "budget_bytes": "host_budget_bytes",
        "used_bytes": "host_used_bytes",
        "hit_tokens": "cache_match_host_tokens",
        "restored_bytes": "cache_restored_bytes",
        "restore_seconds": "cache_restore_seconds",
        "evicted_tokens": "cache_evicted_host_tokens",
        "damaged_segments": "cache_checksum_failures",
        "refused_segments": "cache_refused_segments",
    },
    "store": {
        "tokens": "cache_store_tokens",
        "bytes": "cache_store_bytes",
        "hit_tokens": "cache_match_store_tokens",
        "read_objects": "cache_store_hits",
        "missed_objects": "cache_store_misses",
        "damaged_objects": "cache_store_damaged",
        "foreign_objects": "cache_store_foreign",
        "read_bytes": "cache_store_read_bytes",
        "written_bytes": "cache_store_written_bytes",
        "waiting_writes": "cache_store_waiting",
        "dropped_writes": "cache_store_dropped_writes",
        "failed_calls": "cache_store_failed_calls",
        "refused_calls": "cache_store_refused_calls",
    },
}
"""Reply of ``GET /vericache/cache``: tier -> name -> key of the worker's report."""


class NoAnswerError(VeriCacheError):
    """The schedulers did not answer within the timeout."""


class StateReader:
    """Reads the schedulers' state once for all viewers.

    At most one read is in progress, also if a scheduler is slow.

    Args:
        read: Returns the internal state of every scheduler. It is never cancelled:
            SGLang would return the late answer to the next caller.
        timeout_s: Timeout of a viewer, in seconds.
        fresh_s: Lifetime of a cached answer, in seconds.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[States]],
        *,
        timeout_s: float = TIMEOUT_S,
        fresh_s: float = FRESH_S,
    ) -> None:
        self._read = read
        self._timeout_s = timeout_s
        self._fresh_s = fresh_s
        self._asked: asyncio.Task[list[dict[str, Any]]] | None = None
        self._asked_at = 0.0

    async def state(self) -> list[dict[str, Any]]:
        """Return model name and worker's report (None: off) of every scheduler.

        Raises:
            NoAnswerError: There was no answer in time.
        """
        now = time.monotonic()
        asked = self._asked
        if asked is None or (asked.done() and now - self._asked_at >= self._fresh_s):
            asked = self._asked = asyncio.create_task(self._ask())
            self._asked_at = now
        done, _ = await asyncio.wait({asked}, timeout=self._timeout_s)
        if not done:
            waited = time.monotonic() - self._asked_at
            raise NoAnswerError(
                f"The scheduler has not answered for {waited:.0f} seconds. "
                "It may be in a long prefill, or it may be stuck."
            )
        return asked.result()

    async def _ask(self) -> list[dict[str, Any]]:
        # The state also holds every server argument, API keys included: return only
        # the keys named here.
        return [
            {
                "model": state.get("served_model_name") or state.get("model_path", ""),
                "report": state.get(KEY),
            }
            for state in await self._read()
        ]


def add_routes(
    app: Any, read: Callable[[], Awaitable[States]], guard: Guard, **times: float
) -> None:
    """Add the page and its JSON routes to a Starlette application; idempotent.

    Args:
        read: See ``StateReader``.
        guard: Logs exceptions of a read, with the traceback once.
        **times: See ``StateReader``.
    """
    if any(getattr(route, "path", None) == PATH for route in app.routes):
        return
    reader = StateReader(read, **times)
    markup = files(__package__).joinpath("live_page.html").read_text(encoding="utf-8")
    headers = _headers(markup)

    async def page(request: Request) -> HTMLResponse:
        return HTMLResponse(markup, headers=headers)

    async def state(request: Request) -> JSONResponse:
        try:
            found: Any = await reader.state()
            if request.url.path.endswith(CACHE_PATH):
                reports = (each["report"] for each in found)
                found = [report and cache_tiers(report) for report in reports]
        except NoAnswerError as error:
            return JSONResponse({"error": str(error)}, 503, headers=headers)
        except Exception as error:  # noqa: BLE001  # a page may fail, not log forever
            guard.failed("live page")
            return JSONResponse({"error": repr(error)}, 500, headers=headers)
        return JSONResponse(found, headers=headers)

    for path, show in ((PATH, page), (STATE_PATH, state), (CACHE_PATH, state)):
        app.router.add_route(path, show, methods=["GET"], include_in_schema=False)


def cache_tiers(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known segments, and contents and counters of each cache tier.

    Args:
        report: ``VeriCacheWorker.report``.
    """
    tiers = {
        tier: {name: report[key] for name, key in keys.items()}
        for tier, keys in TIERS.items()
    }
    return {"segments": report["cache_segments"], **with_former_names("cache", tiers)}


def _headers(markup: str) -> dict[str, str]:
    """Return headers that let a browser run only the page's own script."""

    def digest(tag: str) -> str:
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", markup, re.DOTALL)
        sha = hashlib.sha256(text.encode()).digest()
        return f"{tag}-src 'sha256-{base64.b64encode(sha).decode()}'"

    policy = ("default-src 'none'", digest("style"), digest("script"))
    more = ("connect-src 'self'", "base-uri 'none'", "form-action 'none'")
    return {
        "Cache-Control": "no-store",
        # Request ids are chosen by clients.
        "Content-Security-Policy": "; ".join((*policy, *more)),
        "X-Content-Type-Options": "nosniff",
    }
