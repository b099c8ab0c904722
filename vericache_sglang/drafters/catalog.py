"""Opens the inner drafter of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.drafters.model import ModelDrafter, ring_of
from vericache_sglang.drafters.ngram import NgramDrafter

if TYPE_CHECKING:
    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.drafters.base import Drafter
    from vericache_sglang.drafters.features import Features
    from vericache_sglang.drafters.model import SmallModel
    from vericache_sglang.drafters.texts import Texts


def open_drafter(
    config: VeriCacheConfig,
    texts: Texts,
    model: SmallModel | None,
    features: Features | None,
) -> Drafter:
    """Return the inner drafter that ``config.inner`` names, which is not "none".

    Args:
        config: Settings of the server.
        texts: Texts of the running requests.
        model: The small model or the head; None if another drafter is named.
        features: What the head reads; None without one.
    """
    if model is not None:
        ring, most = ring_of(config), config.proposals
        return ModelDrafter(texts, ring, model, most, features)
    return NgramDrafter(texts, config.inner_corpus)
