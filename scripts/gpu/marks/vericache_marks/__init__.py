"""Says in a profile what each decode iteration does, where it begins.

A mark is an empty range named ``vericache[draft=3 verify=1]``: SGLang's own range of a
forward has the rows, but not how many of them verify.
"""

from __future__ import annotations

from collections import Counter
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch.profiler import record_function

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "vericache["


def install() -> None:
    """Hook the beginning of an iteration; SGLang's plugin loader calls this."""
    from vericache_sglang.engine.watch import PHASES, Watch

    begin = Watch.begin

    @wraps(begin)
    def marked(
        self: Any, seats: Mapping[int, Any], actions: Mapping[int, Any] | None
    ) -> None:
        with record_function(mark(seats, actions, PHASES)):
            pass
        begin(self, seats, actions)

    Watch.begin = marked


def mark(
    seats: Mapping[int, Any],
    actions: Mapping[int, Any] | None,
    phases: Mapping[type, str],
) -> str:
    """Return the name of an iteration's mark.

    Args:
        seats: Position in the batch -> request.
        actions: Position in the batch -> what it does; None: all decode plainly.
        phases: Class of an action -> its name.
    """
    if actions is None:
        counts = Counter(plain=len(seats))
    else:
        counts = Counter(phases[type(actions[i])] for i in seats)
    told = " ".join(f"{phase}={count}" for phase, count in sorted(counts.items()))
    return f"{PREFIX}{told}]"
