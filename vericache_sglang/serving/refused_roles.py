"""The settings of drafters and verifiers that are refused, and why."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from vericache_sglang.config.schema import flag
from vericache_sglang.serving.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from vericache_sglang.config.schema import VeriCacheConfig


class AskedRole(NamedTuple):
    """What the flags of a server ask of its role.

    Attributes:
        config: Settings of VeriCache.
        args: SGLang's ``ServerArgs``.
    """

    config: VeriCacheConfig
    args: Any

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses that the role connects to, or is bound to."""
        if self.config.role == "verifier":
            return (self.config.peer_bind,)
        return self.config.verifier_addresses

    @property
    def bad(self) -> str:
        """The first address that is not tcp://HOST:PORT; "" if there is none."""
        return next((each for each in self.addresses if not _is_address(each)), "")

    @property
    def open(self) -> str:
        """The first address that other machines reach without a key; "" if none."""
        if self.config.peer_key != "off" or self.bad:
            return ""
        return next((each for each in self.addresses if not _is_loopback(each)), "")


def _is_address(address: str) -> bool:
    parts = urlsplit(address)
    try:
        return parts.scheme == "tcp" and bool(parts.hostname) and bool(parts.port)
    except ValueError:  # the port is no number, or too large
        return False


def _is_loopback(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is(role: str, setting: str) -> Callable[[AskedRole], bool]:
    """Return a rule: a role whose address is missing."""
    return lambda asked: (
        asked.config.role == role and getattr(asked.config, setting) == "off"
    )


def _without(role: str, setting: str) -> Callable[[AskedRole], bool]:
    """Return a rule: an address for another role."""
    return lambda asked: (
        asked.config.role != role and getattr(asked.config, setting) != "off"
    )


ROLE_RULES: tuple[Rule, ...] = (
    Rule(
        f"{flag('role')} verifier",
        _is("verifier", "peer_bind"),
        "drafters could not connect",
        f"give {flag('peer_bind')} tcp://HOST:PORT",
    ),
    Rule(
        f"{flag('role')} drafter",
        _is("drafter", "verifiers"),
        "it would know no verifier",
        f"give {flag('verifiers')} tcp://HOST:PORT,...",
    ),
    Rule(
        flag("peer_bind"),
        _without("verifier", "peer_bind"),
        "a {0.config.role} server is bound to no address",
        f"give {flag('role')} verifier, or drop it",
    ),
    Rule(
        flag("verifiers"),
        _without("drafter", "verifiers"),
        "a {0.config.role} server has no verifiers",
        f"give {flag('role')} drafter, or drop it",
    ),
    Rule(
        "an address",
        lambda asked: (
            asked.config.role != "standalone"
            and "off" not in asked.addresses
            and bool(asked.bad)
        ),
        "{0.bad} is not tcp://HOST:PORT",
        "write tcp://HOST:PORT, addresses of verifiers with commas between",
    ),
    Rule(
        f"{flag('peer_key')} off",
        lambda asked: asked.config.role != "standalone" and bool(asked.open),
        "{0.open} can be reached from other machines, and whoever connects there could "
        "read and change answers",
        "make a key with openssl rand -hex 32 > FILE; chmod 600 FILE, and give it to "
        "all of them, or use a loopback address",
    ),
    Rule(
        "--tp-size {0.args.tp_size} with " + flag("role"),
        lambda asked: asked.config.role != "standalone" and asked.args.tp_size > 1,
        "only one rank would get the messages",
        "serve every role with --tp-size 1",
    ),
    Rule(
        "--disaggregation-mode with " + flag("role"),
        lambda asked: (
            asked.config.role != "standalone"
            and asked.args.disaggregation_mode != "null"
        ),
        "a guest needs prefill and decode on one server",
        "drop one of them",
    ),
)
