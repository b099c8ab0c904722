"""The ledger notices what is taken twice, kept by the dead, or not booked."""

import pytest

from vericache_sglang.errors import InvariantError
from vericache_sglang.kv.ledger import Account, Ledger


def test_balanced_books_pass():
    ledger = Ledger()
    ledger.take(Account.KEPT_SLOTS, "a", 100)
    ledger.take(Account.STAGING_SLOTS, "a", 7)
    ledger.check({"a"}, staging_used=7)
    assert ledger.give(Account.STAGING_SLOTS, "a") == 7
    assert ledger.give(Account.STAGING_SLOTS, "a") == 0
    assert ledger.give(Account.KEPT_SLOTS, "a") == 100
    ledger.check(set(), staging_used=0)
    assert all(ledger.total(account) == 0 for account in Account)


def test_taking_twice_is_an_error():
    ledger = Ledger()
    ledger.take(Account.KEPT_SLOTS, "a", 1)
    with pytest.raises(InvariantError, match="a takes kept_slots twice"):
        ledger.take(Account.KEPT_SLOTS, "a", 1)


def test_the_dead_hold_nothing():
    ledger = Ledger()
    ledger.take(Account.KEPT_SLOTS, "gone", 5)
    with pytest.raises(InvariantError, match=r"kept_slots held by dead.*gone"):
        ledger.check({"a"}, staging_used=0)


def test_unbooked_staging_is_noticed():
    with pytest.raises(InvariantError, match="staging_slots: booked 0, in use 1"):
        Ledger().check(set(), staging_used=1)
