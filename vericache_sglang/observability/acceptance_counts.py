"""Corrects SGLang's own acceptance figures, which take every row for a verification."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

COUNTS = ("spec_num_accept_tokens", "spec_num_correct_drafts", "spec_num_forward_ct")
"""``SchedulerMetricsReporter``: tokens, accepted drafts and verifications since the
last report."""

TOTALS = ("spec_total_num_accept_tokens", "spec_total_num_forward_ct")
"""``SchedulerMetricsReporter``: tokens and verifications up to the last report."""

UNKNOWN = (0, 0, 1)


@contextmanager
def verifications_only(
    reporter: Any, requests: Sequence[Any], emitted: list[int], bonus: int
) -> Iterator[None]:
    """Let SGLang process a decode result so that only verifications are counted.

    A row that drafted or waited emitted 0 tokens and counts as none; n > 0 tokens are
    n - 1 accepted drafts and one bonus token. What SGLang will add is subtracted
    before. It reports the counts since the last report and divides by their
    verifications; where there was none, those of the last interval are shown again.

    Args:
        reporter: SGLang's ``SchedulerMetricsReporter``.
        requests: The batch's requests.
        emitted: Tokens each row emitted.
        bonus: Tokens of a row that SGLang does not count as accepted drafts, 0 or 1;
            at 1 every row emitted a token.
    """
    tokens, rows = sum(emitted), len(emitted)
    if bonus:  # SGLang counts right: every row verified, if only its last token
        before = _read(reporter, COUNTS)
        yield
        if not reporter.spec_num_forward_ct:
            true = _plus(before, (tokens, tokens - rows, rows))
            reporter.vericache_interval = true
        return
    _correct(requests, emitted)
    verified = sum(n > 0 for n in emitted)
    will_add = (tokens, tokens, rows)
    true = _plus(_read(reporter, COUNTS), (tokens, tokens - verified, verified))
    shown = true if true[2] else getattr(reporter, "vericache_interval", UNKNOWN)
    _set(reporter, COUNTS, _plus(shown, will_add, -1))
    totals = _read(reporter, TOTALS)
    yield
    if reporter.spec_num_forward_ct:  # no report was due
        _set(reporter, COUNTS, true)
    elif true[2]:
        reporter.vericache_interval = true
    else:
        _set(reporter, TOTALS, totals)


def _correct(requests: Sequence[Any], emitted: list[int]) -> None:
    """Subtract what SGLang will add to each request for n accepted drafts."""
    for req, n in zip(requests, emitted, strict=True):
        if req.is_retracted or req.finished():
            continue
        counts = req.spec_correct_drafts_histogram
        counts += [0] * (n + 1 - len(counts))
        counts[n] -= 1
        if n:
            req.spec_num_correct_drafts -= 1
            counts[n - 1] += 1
        else:
            req.spec_verify_ct -= 1


def _plus(a: Sequence[int], b: Sequence[int], sign: int = 1) -> tuple[int, ...]:
    return tuple(x + sign * y for x, y in zip(a, b, strict=True))


def _read(reporter: Any, names: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(getattr(reporter, name) for name in names)


def _set(reporter: Any, names: tuple[str, ...], values: Sequence[int]) -> None:
    for name, value in zip(names, values, strict=True):
        setattr(reporter, name, value)
