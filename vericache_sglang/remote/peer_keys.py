"""CURVE keys of drafters and verifiers, derived from one shared file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from vericache_sglang.prefix_cache.store.keys import read_key


@dataclass(frozen=True, slots=True)
class PeerKeys:
    """Key pairs of the two roles, in Z85; ``drafter_raw`` is 32 bytes.

    Both sides can derive all of them, so whoever has the file is trusted as either.
    """

    drafter_secret: bytes = field(repr=False)
    verifier_secret: bytes = field(repr=False)

    @classmethod
    def read(cls, file: str) -> PeerKeys | None:
        """Derive the keys from the file of ``--vericache-peer-key``; None if it is off.

        Raises:
            ConfigError: It cannot be read, is too short, or others can read it.
        """
        if file == "off":
            return None
        key = read_key(file, "peer_key")
        return cls(_secret(key, b"drafter"), _secret(key, b"verifier"))

    @property
    def drafter_public(self) -> bytes:
        """What a verifier admits."""
        return zmq.curve_public(self.drafter_secret)

    @property
    def drafter_raw(self) -> bytes:
        """``drafter_public`` as ZeroMQ's authentication shows it."""
        return z85.decode(self.drafter_public)

    @property
    def verifier_public(self) -> bytes:
        """What a drafter expects."""
        return zmq.curve_public(self.verifier_secret)


def _secret(key: bytes, role: bytes) -> bytes:
    """Return the secret key of a role: BLAKE2b (RFC 7693) of the shared key."""
    digest = hashlib.blake2b(digest_size=32, person=b"vericache-peer")
    digest.update(len(role).to_bytes(1, "little") + role + key)
    return z85.encode(digest.digest())
