"""``python -m vericache_sglang.bench [NAME]``: the table of benchmarks."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vericache_sglang.errors import VeriCacheError
from vericache_sglang.evaluation import compare
from vericache_sglang.evaluation.benchmarks.chats import CHATS
from vericache_sglang.evaluation.benchmarks.compress_cost import COMPRESS_COST
from vericache_sglang.evaluation.benchmarks.compressors import COMPRESSORS
from vericache_sglang.evaluation.benchmarks.divergence import DIVERGENCE
from vericache_sglang.evaluation.benchmarks.failover import FAILOVER
from vericache_sglang.evaluation.benchmarks.fuzz import FUZZ
from vericache_sglang.evaluation.benchmarks.hardest import HARDEST
from vericache_sglang.evaluation.benchmarks.inner import INNER
from vericache_sglang.evaluation.benchmarks.lossless import LOSSLESS
from vericache_sglang.evaluation.benchmarks.paired import DECODE, SWEEP
from vericache_sglang.evaluation.benchmarks.paper_figures import FIGURES
from vericache_sglang.evaluation.benchmarks.peers import PEERS
from vericache_sglang.evaluation.benchmarks.pipeline1 import PIPELINE1
from vericache_sglang.evaluation.benchmarks.remote import REMOTE
from vericache_sglang.evaluation.benchmarks.sampling import SAMPLING
from vericache_sglang.evaluation.benchmarks.scheduling import SCHEDULING
from vericache_sglang.evaluation.benchmarks.shared_prefix import SHARED_PREFIX
from vericache_sglang.evaluation.benchmarks.soak import SOAK
from vericache_sglang.evaluation.benchmarks.tool_calls import TOOL_CALLS
from vericache_sglang.evaluation.benchmarks.turns import OVERSUBSCRIBED, PACING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vericache_sglang.evaluation.benchmark import Benchmark

BENCHMARKS: Mapping[str, Benchmark] = {
    "decode": DECODE,
    "sweep": SWEEP,
    "hardest": HARDEST,
    "inner": INNER,
    "pacing": PACING,
    "shared-prefix": SHARED_PREFIX,
    "chats": CHATS,
    "oversubscribed": OVERSUBSCRIBED,
    "soak": SOAK,
    "failover": FAILOVER,
    "remote": REMOTE,
    "tool-calls": TOOL_CALLS,
    "lossless": LOSSLESS,
    "sampling": SAMPLING,
    "compressors": COMPRESSORS,
    "compress-cost": COMPRESS_COST,
    "divergence": DIVERGENCE,
    "scheduling": SCHEDULING,
    "fuzz": FUZZ,
    "figures": FIGURES,
    "pipeline1": PIPELINE1,
    "peers": PEERS,
}
"""Benchmarks of the demo models, by name; without a name, systems are compared."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark.

    Args:
        argv: The command line without the program; None takes the process's own.

    Returns:
        0; 1 where something is not as it must be: an answer differs from plain
        SGLang's, a request failed, a system was left out; 2 for a wrong flag.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = ""
    if arguments and arguments[0] in ("--figure", "--figures"):
        arguments[:1] = ["figures", "--figures"]
    if arguments and not arguments[0].startswith("-"):
        name = arguments.pop(0)
    if name and name not in BENCHMARKS:
        print(f"error: no benchmark {name}; {known()}", file=sys.stderr)
        return 2
    try:
        with ended_in_order():
            if name:
                return BENCHMARKS[name].run(name, arguments)
            return compare.main(arguments, known())
    except VeriCacheError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def known() -> str:
    """Return one sentence that names the benchmarks."""
    return f"named benchmarks: {', '.join(BENCHMARKS)}; bench NAME --help"


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Have SIGTERM run what stops the servers: they are in sessions of their own."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
