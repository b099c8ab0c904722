"""Opens the inner drafter of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.drafters.model import ModelDrafter, ring_of
from vericache_sglang.drafters.ngram import NgramDrafter

if TYPE_CHECKING:
    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.drafters.base import Drafter
    from vericache_sglang.drafters.model import SmallModel
    from vericache_sglang.drafters.texts import Texts


def open_drafter(
    config: VeriCacheConfig, texts: Texts, model: SmallModel | None
) -> Drafter:
    """Return the inner drafter that ``config.inner`` names, which is not "none".

    Args:
        config: Settings of the server.
        texts: Texts of the running requests.
        model: The small model; None if another drafter is named.
    """
    if model is not None:
        return ModelDrafter(texts, ring_of(config), model, config.proposals)
    return NgramDrafter(texts, config.inner_corpus)
