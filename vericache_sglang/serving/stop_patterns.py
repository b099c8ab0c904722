"""Bounds the backtracking of a ``stop_regex``; patterns above a bound are refused.

After every token SGLang searches every pattern with Python's backtracking ``re`` in the
request's output, in the process that serves all requests (0.5.21,
``Req._check_str_based_finish``). ``(a+)+$`` takes time that doubles with each character
and ``[^x]*x`` time quadratic in the output: one request would stall all others.
"""

from __future__ import annotations

import re
import re._constants as sre  # type: ignore[import-not-found]
import re._parser as sre_parse  # type: ignore[import-not-found]
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import ConfigError, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_WAYS = 1024
"""Bound on the number of match paths at one position, over a request's patterns."""

MOST_CHARACTERS = 1024
"""Bound on the characters one pattern can span, without a repetition at its end."""

_ONE_CHARACTER = (sre.LITERAL, sre.NOT_LITERAL, sre.IN, sre.ANY)
_REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT)


def check_stop_patterns(patterns: Iterable[str]) -> None:
    """Refuse patterns with a search time that may exceed linear.

    An unbounded repetition is accepted only at the end of a pattern: it matches as
    soon as its minimum count does, so it never backtracks.

    Args:
        patterns: ``stop_regex`` of one request, as a list.

    Raises:
        ConfigError: A pattern is malformed, repeats without a bound before its end,
            or has more ways or characters than the bounds above.
    """
    ways = 0
    for pattern in patterns:
        try:
            count, length = _cost(sre_parse.parse(pattern), last=True)
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(f"stop_regex {quoted(pattern)}: {error}") from error
        except _UnboundedError:
            raise ConfigError(
                f"stop_regex {quoted(pattern)} repeats without a bound before its end; "
                "write {0,16} instead of *, {1,16} instead of +"
            ) from None
        ways += count
        if length > MOST_CHARACTERS:
            raise ConfigError(
                f"stop_regex {quoted(pattern)} may span more than {MOST_CHARACTERS} "
                "characters"
            )
    if ways > MOST_WAYS:
        raise ConfigError(
            f"stop_regex can match in more than {MOST_WAYS} ways at one position; have "
            "fewer or shorter repetitions, and none within another"
        )


class _UnboundedError(Exception):
    """An unbounded repetition before the end of a pattern."""


def _cost(tree: Any, *, last: bool) -> tuple[int, int]:
    """Return upper bounds of (match paths, characters) of a parsed pattern.

    Args:
        tree: A ``SubPattern``.
        last: Whether it ends the pattern.
    """
    ways, length = 1, 0
    for at, (kind, value) in enumerate(tree):
        more, longer = _cost_of_node(kind, value, last and at == len(tree) - 1)
        ways, length = _capped(ways * more), length + longer
    return ways, length


def _cost_of_node(kind: Any, value: Any, last: bool) -> tuple[int, int]:
    if kind in _ONE_CHARACTER:
        return 1, 1
    if kind is sre.AT:
        return 1, 0
    if kind in _REPEATS:
        least, most, inner = value
        return _cost_of_repeat(least, most, inner, last)
    if kind is sre.SUBPATTERN:
        return _cost(value[-1], last=last)
    if kind is sre.ATOMIC_GROUP:
        return _cost(value, last=False)
    if kind in (sre.ASSERT, sre.ASSERT_NOT):
        return _cost(value[1], last=False)
    if kind is sre.BRANCH:
        costs = [_cost(branch, last=last) for branch in value[1]]
        return sum(ways for ways, _ in costs), max(length for _, length in costs)
    raise re.error("backreferences and conditions are not supported")


def _cost_of_repeat(least: int, most: int, inner: Any, last: bool) -> tuple[int, int]:
    ways, length = _cost(inner, last=False)
    if most is sre.MAXREPEAT:
        if not last:
            raise _UnboundedError
        most = least
    if ways == 1:
        return most - least + 1, most * length
    return _capped(ways ** min(most, MOST_WAYS)) + most - least, most * length


def _capped(ways: int) -> int:
    return min(ways, MOST_WAYS + 1)
