"""How many KV slots each system gets of a card's memory, so that both get the same.

VeriCache's staging region lies beside SGLang's pool and is not part of what SGLang
counts, so both pools are set by ``--max-total-tokens`` and the region is taken off.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30

PAGE = 512
"""Slots are rounded to so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The memory that is used of a device.

    Attributes:
        name: In words.
        gib: Of the card that is emulated, as its driver counts; 0: all there is.
        reserve_gib: Of it, kept for activations, graphs and the driver.
    """

    name: str
    gib: float = 0.0
    reserve_gib: float = 8.0

    def slots(self, weight_bytes: int, token_bytes: int, device_bytes: int) -> int:
        """Return the KV slots that fit beside a model's weights.

        Args:
            weight_bytes: Of the model.
            token_bytes: Of the KV of one token.
            device_bytes: Of the device that is there.

        Raises:
            ValueError: The weights leave no room, or the device is too small.
        """
        whole = int(self.gib * GIB) or device_bytes
        if whole > device_bytes:
            raise ValueError(
                f"{self.name} needs {whole / GIB:.1f} GiB, the device has "
                f"{device_bytes / GIB:.1f}"
            )
        left = whole - int(self.reserve_gib * GIB) - weight_bytes
        if left < PAGE * token_bytes:
            raise ValueError(
                f"{self.name}: weights of {weight_bytes / GIB:.1f} GiB leave no room"
            )
        return left // token_bytes // PAGE * PAGE


@dataclass(frozen=True, slots=True)
class Share:
    """How a budget of slots is divided, and what that lets run.

    Attributes:
        pool: Slots of SGLang's pool.
        staging: Slots of the staging region; 0 for plain SGLang.
        at_once: Requests that fit beside each other, one of them being prefilled, for
            which its whole prompt must be in the pool; 0: not even one.
    """

    pool: int
    staging: int
    at_once: int


def plain_share(budget: int, prompt: int, output: int) -> Share:
    """Return what plain SGLang makes of a budget of slots."""
    return Share(budget, 0, budget // (prompt + output))


def drafting_share(budget: int, prompt: int, output: int, keep: float) -> Share:
    """Return what VeriCache makes of it, where complements are on the host.

    Args:
        budget: Slots.
        prompt: Tokens of the longest prompt.
        output: Tokens of an answer.
        keep: Part of a prompt that stays in the pool.
    """
    kept = int(prompt * keep) + output
    staging = -(-int(prompt * (1 - keep) + 1) // PAGE) * PAGE
    pool = max(0, budget - staging)
    beside = pool - (prompt + output)
    return Share(pool, staging, 0 if beside < 0 else 1 + beside // kept)
