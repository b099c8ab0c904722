"""Extends SGLang's HTTP server with the live page and the consistency check."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from vericache_sglang.config.files import active_config
from vericache_sglang.config.schema import VeriCacheConfig
from vericache_sglang.former_names import with_former_names
from vericache_sglang.observability.consistency_check import ConsistencyCheck
from vericache_sglang.observability.guard import Guard
from vericache_sglang.observability.prometheus import Metrics
from vericache_sglang.observability.table import PUBLISHED
from vericache_sglang.serving.live_page import add_routes
from vericache_sglang.serving.refused_flags import ALGORITHM

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence


def extend_at_start(app: Any) -> None:
    """Let an application call ``extend`` when it starts, before it listens.

    With several tokenizer processes (``--tokenizer-worker-num``) SGLang serves from
    processes that import an application of their own, so nothing is added there.

    Args:
        app: ``sglang.srt.entrypoints.http_server.app`` of the launcher's process.
    """
    start = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(started: Any) -> AsyncIterator[Any]:
        async with start(started) as state:
            extend(started)
            yield state

    app.router.lifespan_context = lifespan


def extend(app: Any) -> None:
    """Add the routes and the check that the settings ask for.

    Args:
        app: A started ``sglang.srt.entrypoints.http_server.app``.
    """
    from sglang.srt.entrypoints.http_server import get_global_state

    guard, manager = Guard(), get_global_state().tokenizer_manager
    guard.call("live page", lambda: _extend(app, manager, guard), None)


def _extend(app: Any, manager: Any, guard: Guard) -> None:
    config = active_config() or VeriCacheConfig()
    read = manager.get_internal_state
    if (app.server_args.speculative_algorithm or "").upper() == ALGORITHM:
        check = open_check(config, manager, guard)
        read = _with_figures(read, check)
    if config.live_page == "on":
        add_routes(app, read, guard)


def open_check(config: VeriCacheConfig, manager: Any, guard: Guard) -> ConsistencyCheck:
    """Return the consistency check, hooked up to answers and metrics.

    Args:
        config: Its ``consistency_check_rate``; at 0 nothing is checked, and the
            check's metrics stay at 0.
        manager: SGLang's ``TokenizerManager``.
        guard: Contains the check's exceptions, so that SGLang's loop continues.
    """
    rate = config.consistency_check_rate
    check = ConsistencyCheck(rate, config.seed, manager, guard)
    if rate:
        # Called by the hook (patches: managers_tokenizer_manager).
        manager.vericache_finished = check.finished
    if manager.enable_metrics:
        rows = [row for row in PUBLISHED if row.source == "check"]
        labels = manager.metrics_collector.labels
        check.changed = Metrics(labels, check.report, rows).idle
    return check


def _with_figures(
    read: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]], check: ConsistencyCheck
) -> Callable[[], Awaitable[Sequence[Mapping[str, Any]]]]:
    """Return a state reader that adds the check's counters to every report."""

    async def joined() -> Sequence[Mapping[str, Any]]:
        counts = with_former_names("report", check.report())
        return [
            {**state, "vericache": {**state["vericache"], **counts}}
            if state.get("vericache")
            else state
            for state in await read()
        ]

    return joined
