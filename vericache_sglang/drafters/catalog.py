"""Opens the inner drafter of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.drafters.ngram import NgramDrafter

if TYPE_CHECKING:
    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.drafters.base import Drafter
    from vericache_sglang.drafters.texts import Texts


def open_drafter(config: VeriCacheConfig, texts: Texts) -> Drafter:
    """Return the inner drafter that ``config.inner`` names, which is not "none"."""
    return NgramDrafter(texts, config.inner_corpus)
