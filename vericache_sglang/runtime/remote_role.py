"""What a server does with others: it is a drafter, a verifier, or alone."""

from __future__ import annotations

import atexit
import os
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol

from vericache_sglang.prefix_cache.store.opening import DISTRIBUTION, fingerprint_of
from vericache_sglang.remote.messages import (
    PROTOCOL,
    Hello,
    decode_to_drafter,
    decode_to_verifier,
)
from vericache_sglang.remote.owner import Owner
from vericache_sglang.remote.peer_keys import PeerKeys
from vericache_sglang.remote.transport import (
    DrafterTransport,
    Transport,
    VerifierTransport,
)
from vericache_sglang.runtime.hosting import RESERVED, Hosting
from vericache_sglang.runtime.paired import SHARES
from vericache_sglang.runtime.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang.srt.managers.schedule_batch import Req

    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.runtime.placement import KVPlacement

SAMPLING_ARGS = (
    *("enable_deterministic_inference", "sampling_backend", "grammar_backend"),
    *("constrained_json_whitespace_pattern", "enable_strict_thinking"),
    # Penalties count with one step of delay under overlap.
    *("constrained_json_disable_any_whitespace", "disable_overlap_schedule"),
)
"""SGLang's arguments on which a sampled token depends."""


STANDALONE: dict[str, float] = {
    **dict.fromkeys(("remote_malformed", "remote_verifiers", "remote_guests"), 0),
    **dict.fromkeys((*SHARES.values(), *RESERVED.values()), 0.0),
}
"""Figures of a server without a role."""


class Role(Protocol):
    """What the hooks on the scheduler and the worker ask of a role."""

    @property
    def transport(self) -> Transport[Any, Any]:
        """Its connections."""

    @property
    def in_flight(self) -> Iterable[Req]:
        """Requests that are in none of SGLang's queues and batches."""

    def take(self, scheduler: Any, req: Req, is_retracted: bool) -> bool:
        """Return whether a request is not to enter the waiting queue."""

    def exchange(self, scheduler: Any) -> None:
        """Send and receive. Called once per scheduler iteration."""

    def change(self) -> None:
        """Note that the model gets other weights: peers no longer have the same."""

    def figures(self) -> dict[str, float]:
        """Return its own of the figures ``STANDALONE``, for the worker's report."""

    def close(self) -> None:
        """Close the connections; at exit."""


def open_role(
    config: VeriCacheConfig, server_args: Any, placement: KVPlacement, vocabulary: int
) -> Role | None:
    """Connect to verifiers, or serve drafters; None for a standalone server.

    Args:
        vocabulary: Number of token ids.

    Raises:
        ConfigError: An address cannot be bound, or the key or the weights not be read.
    """
    if config.role == "standalone":
        return None
    pool = placement.handles.host.dtype
    model = fingerprint_of(placement.geometry, pool, config, server_args)
    hello = Hello(
        os.urandom(16),
        PROTOCOL,
        version("sglang"),
        version(DISTRIBUTION),
        model.short,
        vocabulary,
        " ".join(f"{name}={getattr(server_args, name)}" for name in SAMPLING_ARGS),
    )
    keys = PeerKeys.read(config.peer_key)
    role: Role
    if config.role == "verifier":
        door = VerifierTransport(config.peer_bind, decode_to_verifier, keys)
        role = Hosting(config, hello, door, placement.counters)
    else:
        addresses = config.verifier_addresses
        counters = placement.counters
        owner = Owner(addresses, hello, config.lease_s, vocabulary, counters)
        links = DrafterTransport(addresses, decode_to_drafter, keys)
        role = Relay(config, hello, owner, links, counters)
    atexit.register(role.close)
    return role
