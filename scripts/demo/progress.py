"""What a demonstration prints while it works."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterator

TICK_SECONDS = 10.0
console = Console(highlight=False, soft_wrap=True)


@contextmanager
def step(label: str) -> Iterator[None]:
    """Print the current step every ten seconds, and its duration at the end."""
    began, done = time.monotonic(), threading.Event()

    def tick() -> None:
        while not done.wait(TICK_SECONDS):
            console.print(f"  {label}: {time.monotonic() - began:.0f} s ...")

    ticker = threading.Thread(target=tick, daemon=True)
    console.print(f"{label} ...")
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()
    console.print(f"  {label}: done in {time.monotonic() - began:.1f} s")
