"""What is read from a store: one segment, or several in the background."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from vericache_sglang.prefix_cache.store.manifest import Manifest
    from vericache_sglang.prefix_cache.store.objects import Part, Tensors


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A segment read from the store, with verified checksums.

    Attributes:
        manifest: Its compressor, number of tokens, and number of kept tokens.
        parts: ``whole``, or ``draft`` and ``residual``, see ``layout``; views.
    """

    manifest: Manifest
    parts: Mapping[Part, Tensors]


@dataclass(slots=True, eq=False)
class StoreFetch:
    """A background read of segments, up to the first missing one.

    Attributes:
        names: The requested segments.
        found: The segments read so far, in order; another thread appends to it.
        cancelled: Set to stop reading.
        future: Completes with the read; None if it was refused.
    """

    names: Sequence[str]
    found: list[Found] = field(default_factory=list)
    cancelled: bool = False
    future: Future[None] | None = None

    @property
    def done(self) -> bool:
        """Whether the read has ended."""
        return self.future is None or self.future.done()

    def end(self) -> None:
        """End a read that consists of several jobs."""
        if self.future is not None:
            self.future.set_result(None)
