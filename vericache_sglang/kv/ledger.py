"""Books of the slots that requests hold, for consistency checks."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING

from vericache_sglang.errors import InvariantError

if TYPE_CHECKING:
    from collections.abc import Collection


class Account(Enum):
    """A resource the ledger counts."""

    KEPT_SLOTS = "kept_slots"
    STAGING_SLOTS = "staging_slots"


class Ledger:
    """Counts the slots that each request holds, by account."""

    def __init__(self) -> None:
        self._books: dict[Account, Counter[str]] = {kind: Counter() for kind in Account}

    def take(self, account: Account, rid: str, amount: int) -> None:
        """Book ``amount`` > 0 to a request.

        Raises:
            InvariantError: The request already holds some of this account.
        """
        if self._books[account][rid]:
            raise InvariantError(f"{rid} takes {account.value} twice")
        self._books[account][rid] = amount

    def give(self, account: Account, rid: str) -> int:
        """Clear a request's holding of an account; return its amount."""
        return self._books[account].pop(rid, 0)

    def clear(self) -> None:
        """Clear all holdings."""
        for book in self._books.values():
            book.clear()

    def total(self, account: Account) -> int:
        """Return the holdings of all requests together."""
        return sum(self._books[account].values())

    def check(self, living: Collection[str], staging_used: int) -> None:
        """Compare the books with the requests and the staging buffer.

        Args:
            living: Ids that may hold slots: requests, and residual KV being staged.
            staging_used: Slots in use according to the staging buffer.

        Raises:
            InvariantError: A dead request still holds slots, or a total is off.
        """
        for account, book in self._books.items():
            dead = sorted(rid for rid in book if book[rid] and rid not in living)
            if dead:
                raise InvariantError(f"{account.value} held by dead requests {dead}")
        booked = self.total(Account.STAGING_SLOTS)
        if booked != staging_used:
            raise InvariantError(
                f"staging_slots: booked {booked}, in use {staging_used}"
            )
