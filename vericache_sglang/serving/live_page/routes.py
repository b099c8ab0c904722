"""Where the page hangs in SGLang's HTTP server.

An ordinary route of the same application: with ``--api-key`` SGLang's middleware asks
for the key here too, in the ``Authorization`` header, as it does for every path except
health, readiness and metrics.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.responses import HTMLResponse

from vericache_sglang.serving.live_page.page import HEADERS, body, failure, page
from vericache_sglang.serving.live_page.source import NoAnswerError, Source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.requests import Request

PATH = "/vericache"


def add_routes(app: Any) -> None:
    """Add the page to SGLang's application, once, before it serves.

    Args:
        app: ``sglang.srt.entrypoints.http_server.app``.
    """
    add_page(app, Source(_internal_states))


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
