"""The table of tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.evaluation.tasks.complex_func_bench import COMPLEX_FUNC_BENCH
from vericache_sglang.evaluation.tasks.gsm8k_long import GSM8K_LONG
from vericache_sglang.evaluation.tasks.lmcache_trace import LMCACHE_TRACE
from vericache_sglang.evaluation.tasks.long_gen_bench import LONG_GEN_BENCH
from vericache_sglang.evaluation.tasks.pisanitizer import PISANITIZER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vericache_sglang.evaluation.tasks.sample import Task

TASKS: Mapping[str, Task] = {
    "lmcache-trace": LMCACHE_TRACE,
    "complex-func-bench": COMPLEX_FUNC_BENCH,
    "pisanitizer": PISANITIZER,
    "long-gen-bench": LONG_GEN_BENCH,
    "gsm8k-long": GSM8K_LONG,
}
"""By the name of ``--tasks``; also the folder of its files under ``--data``."""
