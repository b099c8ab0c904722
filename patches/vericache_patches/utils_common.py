"""Hooks on ``sglang/srt/utils/common.py``."""

from __future__ import annotations

import sys
from typing import Any

from vericache_patches.record import Hook, Patch

SERVER = "sglang.srt.entrypoints.http_server"


def set_uvicorn_logging_configs(server_args: Any = None) -> None:
    """Extend the HTTP server in SGLang's last call before it listens.

    Our plugin sets ``vericache_extend`` on the hooked module.
    """
    common, server = sys.modules["sglang.srt.utils.common"], sys.modules.get(SERVER)
    extend = getattr(common, "vericache_extend", None)
    if server is not None and extend is not None:
        extend(server.app)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target="sglang.srt.utils.common.set_uvicorn_logging_configs",
            kind="before",
            args=("server_args",),
            reason="No registry takes routes, and a hook inside the HTTP server's own "
            "module would import it in every scheduler.",
            remove_when="SGLang lets plugins add routes.",
        ),
        set_uvicorn_logging_configs,
    ),
)
