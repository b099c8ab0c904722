"""What SGLang's HTTP server is extended with, by the settings it runs with."""

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from vericache_sglang.config.files import ENV, active_config
from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang


@pytest.fixture
def extend(monkeypatch):
    """Extend an application over a manager with a canned state; return both."""
    define_missing_ops()
    from sglang.srt.entrypoints import http_server

    from vericache_sglang.serving.http_server import extend_at_start

    async def state():
        return [{"model_path": "m", "vericache": {"cycles": 3}}]

    def run(rate=0.0, algorithm="VERICACHE", page="on"):
        settings = {"consistency_check_rate": rate, "live_page": page}
        monkeypatch.setenv(ENV, json.dumps(settings))
        active_config.cache_clear()
        managers = []

        @asynccontextmanager
        async def started(app):
            """Make what SGLang has made by then."""
            managers.append(SimpleNamespace(get_internal_state=state))
            managers[0].enable_metrics = False
            held = SimpleNamespace(tokenizer_manager=managers[0])
            monkeypatch.setattr(http_server, "_global_state", held)
            yield {"name": "kept"}

        app = FastAPI(lifespan=started)
        app.server_args = SimpleNamespace(speculative_algorithm=algorithm)
        extend_at_start(app)
        asyncio.run(start(app))
        return app, managers[0]

    yield run
    active_config.cache_clear()


async def start(app):
    async with app.router.lifespan_context(app) as held:
        assert held == {"name": "kept"}


def get(app):
    async def run():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://s") as http:
            return (await http.get("/vericache/state")).json()

    return asyncio.run(run())


def test_the_checks_figures_are_in_the_state_and_finished_requests_reach_it(extend):
    app, manager = extend(rate=0.5)
    (found,) = get(app)
    assert found["report"]["cycles"] == 3
    assert found["report"]["consistency_checks"] == 0
    assert found["report"]["shadow_checks"] == 0
    assert manager.vericache_finished.__self__.report()["consistency_pending"] == 0


def test_at_rate_0_no_request_is_looked_at(extend):
    _, manager = extend()
    assert not hasattr(manager, "vericache_finished")


def test_another_algorithm_is_not_checked(extend):
    app, manager = extend(rate=0.5, algorithm=None)
    assert "consistency_checks" not in get(app)[0]["report"]
    assert not hasattr(manager, "vericache_finished")


def test_without_the_page_the_check_is_left(extend):
    app, manager = extend(rate=0.5, page="off")
    assert [route.path for route in app.routes if "/vericache" in route.path] == []
    assert manager.vericache_finished.__self__.report()["consistency_pending"] == 0
