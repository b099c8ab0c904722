"""What a decode server of a prefill/decode pair refuses, and why.

Its requests arrive with the KV of their prompt, which a plain prefill server has made:
nothing of the prompt's forward but its KV is known, and the queries of its last tokens,
which are run again (``runtime.probing``). A request that loses its KV, or is
retracted, has it sent again by the same prefill server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vericache_sglang.compression.catalog import create_compressor
from vericache_sglang.serving.rule import Rule

if TYPE_CHECKING:
    from vericache_sglang.config.schema import VeriCacheConfig

_LEAVE_OUT = "leave it out"


class DecodeServer(NamedTuple):
    """The flags of a server with ``--disaggregation-mode decode``.

    Attributes:
        config: Settings of VeriCache.
        args: SGLang's ``ServerArgs``.
    """

    config: VeriCacheConfig
    args: Any


def _needs_the_prompts_forward(server: DecodeServer) -> bool:
    needs = create_compressor(server.config.compressor, server.config.seed).needs
    # Probes are forwards of this server, so what they show is there.
    hidden = needs.hidden and not needs.probes
    return needs.q_stream or hidden


def _without(field: str, reason: str, remedy: str = _LEAVE_OUT) -> Rule:
    """Refuse any value of a flag but its default, False, 0 or None."""
    return Rule(
        f"--{field.replace('_', '-')}",
        lambda server: bool(getattr(server.args, field)),
        reason,
        remedy,
    )


DECODE_RULES: tuple[Rule, ...] = (
    Rule(
        "--vericache-compressor",
        _needs_the_prompts_forward,
        "{0.config.compressor} reads queries or hidden states of the whole prompt's "
        "forward, which ran on the prefill server",
        "use snapkv, keynorm, recency, random or kvzip, or a codec alone",
    ),
    Rule(
        "--vericache-inner {0.config.inner}",
        lambda server: server.config.inner_weights,
        "the pools of a small model are untested there, and nothing is known of what "
        "the prompt's forward computed",
        "use --vericache-inner ngram",
    ),
    Rule(
        "--vericache-consistency-check-rate",
        lambda server: server.config.consistency_check_rate > 0,
        "a replayed request would have no prefill server",
        _LEAVE_OUT,
    ),
    _without(
        "disaggregation_decode_enable_radix_cache",
        "cached KV would be matched by token position",
    ),
    _without(
        "disaggregation_decode_enable_offload_kvcache",
        "it copies the KV of running requests by token position",
    ),
    _without(
        "disaggregation_decode_host_receive_threshold",
        "it would own host copies of KV that VeriCache compresses",
    ),
    _without(
        "disaggregation_enable_kv_checksum",
        "the sums of KV that is sent a second time are untested",
    ),
    _without("enable_pd_role_switch", "a prefill server has nothing to draft"),
    _without(
        "enable_lora",
        "KV that is sent a second time is made without the adapter",
    ),
    _without(
        "hicache_storage_backend", "a decode server has no radix cache to store from"
    ),
    Rule(
        "--disaggregation-transfer-backend",
        lambda server: server.args.disaggregation_transfer_backend == "fake",
        "it sends no KV",
        "use mooncake, mooncake_tcp or nixl",
    ),
    Rule(
        "--tp-size",
        lambda server: server.args.tp_size != 1,
        "arrivals on several ranks are untested",
        "use one rank",
    ),
)
"""Rules over ``DecodeServer``."""
