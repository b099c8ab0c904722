"""Where the page hangs in SGLang's HTTP server.

An ordinary route of the same application: with ``--api-key`` SGLang's middleware asks
for the key here too, in the ``Authorization`` header, as it does for every path except
health, readiness and metrics.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.responses import HTMLResponse, JSONResponse

from vericache_sglang.serving.live_page.cache_tiers import cache_tiers
from vericache_sglang.serving.live_page.page import HEADERS, body, failure, page
from vericache_sglang.serving.live_page.source import NoAnswerError, Source

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from starlette.requests import Request

PATH = "/vericache"

CACHE_PATH = "/vericache/cache"
"""Answers with what each tier of the prefix cache holds, as JSON."""


def add_routes(app: Any) -> None:
    """Add the page to SGLang's application, once, before it serves.

    Args:
        app: ``sglang.srt.entrypoints.http_server.app``.
    """
    add_page(app, Source(_internal_states))
    add_cache(app, _internal_states)


def add_cache(
    app: Any, read: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]]
) -> None:
    """Add ``GET /vericache/cache`` to a Starlette application, once.

    Args:
        app: The application.
        read: Returns the internal state of every scheduler.
    """
    if any(getattr(route, "path", None) == CACHE_PATH for route in app.routes):
        return

    async def show(request: Request) -> JSONResponse:
        """Answer with one object per scheduler; null where VeriCache is off."""
        states = [state.get("vericache") for state in await read()]
        return JSONResponse([state and cache_tiers(state) for state in states])

    app.router.add_route(CACHE_PATH, show, methods=["GET"], include_in_schema=False)


def add_page(app: Any, source: Source) -> None:
    """Add ``GET /vericache`` to a Starlette application; a second call adds nothing.

    Args:
        app: The application.
        source: Where readings come from.
    """
    if any(getattr(route, "path", None) == PATH for route in app.routes):
        return

    async def show(request: Request) -> HTMLResponse:
        """Answer with the page, or with ``?fragment=1`` its changing part."""
        status = 200
        try:
            content = body(await source.readings(), time.time())
        except NoAnswerError as error:
            status, content = 503, failure(str(error))
        if request.query_params.get("fragment") != "1":
            content = page(content)
        return HTMLResponse(content, status, headers=dict(HEADERS))

    app.router.add_route(PATH, show, methods=["GET"], include_in_schema=False)


async def _internal_states() -> Sequence[Mapping[str, Any]]:
    """Ask the schedulers, as ``GET /server_info`` does."""
    from sglang.srt.entrypoints.http_server import get_global_state

    manager = get_global_state().tokenizer_manager
    states: Sequence[Mapping[str, Any]] = await manager.get_internal_state()
    return states
