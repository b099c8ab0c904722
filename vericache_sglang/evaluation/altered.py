"""Servers altered by a benchmark: lossy, random acceptance, timed, maximum drafts.

The first two are not lossless and serve as comparisons; the others do not change
answers. A server is altered only if a benchmark started it: ``environment`` writes the
entry point that makes SGLang load ``install`` into a folder of the benchmark's own, and
names the alteration in ``ENV``. Neither exists anywhere else. An altered server reports
it in its log and counters (``KEY``), and the benchmark compares that with its label.
"""

from __future__ import annotations

import logging
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import ConfigError
from vericache_sglang.evaluation import timers
from vericache_sglang.evaluation.dice import in_buffer, simulated_acceptance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)

ENV = "VERICACHE_ALTERED"
"""Variable with comma-separated alterations: ``lossy``, ``accept=P`` (a probability),
``longest`` (drafts and proposals are as long as a request allows, whatever they
cost), ``guesses`` (the inner drafter proposes random tokens) and ``timed=FILE`` (see
``timers``)."""

KEY = "altered"
"""The server's counter that names its alterations; also the key in a request's
``custom_params`` with the tokens a lossy server must emit."""

LOSSY = "lossy"
ACCEPT = "accept="
LONGEST = "longest"
GUESSES = "guesses"
TIMED = "timed="

WARNING = "VeriCache ALTERED by a benchmark: %s"


def environment(
    folder: Path, alteration: str, given: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment variables of an altered server.

    Args:
        folder: The caller's own folder; the entry point is written into it.
        alteration: See ``ENV``.
        given: Environment with the ``PYTHONPATH`` to extend.
    """
    info = folder / "vericache_altered-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    text = "Metadata-Version: 2.1\nName: vericache-altered\nVersion: 0\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
    entry = f"[sglang.srt.plugins]\nvericache-altered = {__name__}:install\n"
    (info / "entry_points.txt").write_text(entry, encoding="utf-8")
    paths = [str(folder), *filter(None, [given.get("PYTHONPATH")])]
    return {ENV: alteration, "PYTHONPATH": os.pathsep.join(paths)}


def simulated(acceptance: float) -> str:
    """Return the alteration that accepts every draft token with this probability.

    Raises:
        ConfigError: It is not a probability.
    """
    if not 0 <= acceptance <= 1:
        raise ConfigError(f"--simulated-acceptance must be >= 0 and <= 1: {acceptance}")
    return f"{ACCEPT}{acceptance:g}"


def install() -> None:
    """Apply the alterations of ``ENV`` to this process; called by SGLang's loader.

    Raises:
        ConfigError: ``ENV`` names an unknown alteration.
    """
    alteration = os.environ.get(ENV, "")
    for part in alteration.split(","):
        if part == LOSSY:
            _emit_drafts()
        elif part == LONGEST:
            _draft_longest()
        elif part == GUESSES:
            _guess()
        elif part.startswith(ACCEPT):
            _simulate_acceptance(float(part.removeprefix(ACCEPT)))
        elif part.startswith(TIMED):
            timers.install(Path(part.removeprefix(TIMED)))
        else:
            raise ConfigError(f"{ENV} {part!r}: must be {LOSSY}, {ACCEPT}P, ...")
    _declare(alteration)
    logger.warning(WARNING, alteration)


def forced_tokens(tokens: Sequence[int]) -> dict[str, Any]:
    """Return ``custom_params`` that make a lossy server emit ``tokens``.

    The request has to ask for log-probabilities; they are still those of its
    compressed KV, each after the tokens before it.
    """
    return {KEY: {"forced": list(tokens)}}


def alteration_in(counters: Mapping[str, Any]) -> str:
    """Return the alterations named in a server's counters; "" for none."""
    return str(counters.get(KEY, ""))


def _emit_drafts() -> None:
    """Emit every draft token unverified; plan no verification and no prefetch.

    The server then decodes on the draft KV alone, as a lossy server would. The residual
    KV of each prompt is still copied to the host once.
    """
    from vericache_sglang.runtime.forward import mixed
    from vericache_sglang.runtime.result_recorder import ResultRecorder
    from vericache_sglang.scheduling.runtime import Runtime

    queries, launch = mixed._queries, ResultRecorder.launch
    settle = mixed.MixedForward._settle

    def asked(*args: Any) -> Any:
        return [replace(row, emits=True) for row in queries(*args)]

    def launched(self: Any, state: Any, at: int, **row: Any) -> Any:
        track = self._runtime.tracks.get(state.rid)
        if track is not None and track.split:
            track.emitted_at = self._runtime.now
            track.remaining -= 1
            _begin(self._runtime, track)
        return launch(self, state, at, **row)

    def settled(self: Any, batch: Any, rows: Any, asked: Any, *more: Any) -> Any:
        chosen, table = more
        chosen = [
            _forced(row.state) or run for row, run in zip(asked, chosen, strict=True)
        ]
        return settle(self, batch, rows, asked, chosen, table)

    _put(mixed, "_queries", asked)
    _put(mixed.MixedForward, "_settle", settled)
    _put(ResultRecorder, "launch", launched)
    _put(Runtime, "_begin", _begin)


def _begin(runtime: Any, track: Any) -> None:
    """Plan one draft token for the next iteration, without reservations."""
    track.drafts = 0
    track.most = 1 if track.remaining > 0 else -1


def _forced(state: Any) -> list[int]:
    """Return the next forced token of a request; empty if none is forced."""
    asked = (state.req.sampling_params.custom_params or {}).get(KEY, {})
    forced: list[int] = asked.get("forced", [])
    return forced[state.emitted : state.emitted + 1]


def _simulate_acceptance(acceptance: float) -> None:
    """Accept each draft token with a probability; a rejection ends the cycle."""
    from vericache_sglang.runtime.forward import draft_tokens as draft_tokens
    from vericache_sglang.sampling import sampler

    _put(sampler, "accepted_tokens", simulated_acceptance(acceptance, random.Random(0)))
    _put(draft_tokens, "token_commit", in_buffer(acceptance, seed=0))


def _draft_longest() -> None:
    """Draft and propose in every cycle and row the most that its request allows."""
    from vericache_sglang.scheduling.proposals import Proposals
    from vericache_sglang.scheduling.throughput import Throughput

    best = Throughput.best

    def longest(self: Any, track: Any, *args: Any, **named: Any) -> Any:
        most = min(self._settings.draft_length, track.spec.longest)
        return replace(best(self, track, *args, **named), length=most)

    def most(self: Any, cost: Any) -> None:
        self.count = self.most

    _put(Throughput, "best", longest)
    _put(Proposals, "choose", most)


def _guess() -> None:
    """Have the inner drafter propose random tokens."""
    from vericache_sglang.evaluation.dice import RandomDrafter
    from vericache_sglang.runtime import worker

    _put(worker, "open_drafter", lambda *given: RandomDrafter())


def _declare(alteration: str) -> None:
    from vericache_sglang.runtime.worker import VeriCacheWorker

    report = VeriCacheWorker.report

    def declared(self: Any) -> dict[str, Any]:
        return {**report(self), KEY: alteration}

    _put(VeriCacheWorker, "report", declared)


def _put(owner: Any, name: str, value: Any) -> None:
    """Replace attribute ``name`` of ``owner``; a missing attribute is an error."""
    getattr(owner, name)
    setattr(owner, name, value)
