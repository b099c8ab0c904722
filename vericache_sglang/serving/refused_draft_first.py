"""What a server refuses that starts requests on stored draft KV, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vericache_sglang.compression.catalog import create_compressor
from vericache_sglang.config.schema import flag
from vericache_sglang.prefix_cache.assembly import may_be_shared
from vericache_sglang.serving.rule import Rule

if TYPE_CHECKING:
    from vericache_sglang.config.schema import VeriCacheConfig


class DraftFirst(NamedTuple):
    """The settings of a server that starts requests on stored draft KV.

    Attributes:
        config: Settings of VeriCache.
        args: SGLang's ``ServerArgs``.
    """

    config: VeriCacheConfig
    args: Any

    @property
    def asking(self) -> str:
        """The flag that asks for it; "" if none does."""
        config = self.config
        if config.drafts_for_verifiers:
            return f"{flag('remote_path')} {config.remote_path}"
        return f"{flag('draft_first')} on" if config.draft_first == "on" else ""


def _stores_no_parts(asked: DraftFirst) -> bool:
    compressor = create_compressor(asked.config.compressor, asked.config.seed)
    return not may_be_shared(compressor.selector)


DRAFT_FIRST_RULES: tuple[Rule, ...] = (
    Rule(
        "{0.asking}",
        lambda asked: not asked.args.hicache_storage_backend,
        "there is no store to read draft KV from",
        "give --hicache-storage-backend, or drop it",
    ),
    Rule(
        "--disable-radix-cache",
        lambda asked: asked.args.disable_radix_cache,
        "without it nothing is matched with a store",
        "drop it",
    ),
    Rule(
        f"{flag('compressor')} {{0.config.compressor}}",
        _stores_no_parts,
        "the draft KV of its prompts is not stored",
        "use a codec alone, or a selector whose choice depends on the preceding tokens "
        "alone, as keynorm's does",
    ),
    Rule(
        f"{flag('inner')} {{0.config.inner}}",
        lambda asked: asked.config.inner_weights,
        "it would not have read the prompt",
        f"use {flag('inner')} ngram",
    ),
    Rule(
        f"{flag('acceptance')} rejection with {{0.asking}}",
        lambda asked: (
            asked.config.acceptance == "rejection" and asked.config.drafts_for_verifiers
        ),
        "its verifier does not know from which distribution a draft was drawn",
        f"use {flag('acceptance')} coupled",
    ),
    Rule(
        f"{flag('draft_length')} 1 with {{0.asking}}",
        lambda asked: (
            asked.config.draft_length < 2 and asked.config.drafts_for_verifiers
        ),
        "the last draft is not sent, so nothing would be verified",
        "use 2 or more",
    ),
    Rule(
        "--tp-size {0.args.tp_size}",
        lambda asked: asked.args.tp_size > 1,
        "the ranks do not agree on which draft KV has been read",
        "use one rank",
    ),
    Rule(
        f"{flag('role')} {{0.config.role}}",
        lambda asked: (
            asked.config.draft_first == "on" and asked.config.role != "standalone"
        ),
        "it is untested with requests that other servers own or decode",
        f"drop {flag('draft_first')}; a drafter has {flag('remote_path')} p1 and p2",
    ),
)
"""Rules over ``DraftFirst``."""
