"""Checks that servers boot and answer like plain SGLang.

The demo model's answers are copied from far back in the prompt, so KV that is read from
a wrong place shows. It was trained up to 16K and answers well at 32K.
"""

from __future__ import annotations

import json
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

from gpu.check import ROOT, Check, NotMetError, backend_flags, first_difference
from gpu.results import log_end

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpu.check import Context
    from gpu.job import Job
    from vericache_sglang.evaluation.server import OwnServer

MODEL = ROOT / "configs" / "demo-model-long"

OUTPUT = 48
"""Tokens of an answer: one tool call."""

ANSWER_SECONDS = 90
"""Most for an answer; kernels are compiled at first use."""

SHORT, LONG, AGAIN = "short prompt", "long prompt", "prefix hit"
LENGTHS = {
    "cuda": {SHORT: 4000, LONG: 32000},
    "cpu": {SHORT: 600, LONG: 2400},
}
"""Tokens of the prompts, by device; the long one is prefilled in chunks."""

COUNTED = ("cycles", "drafted", "accepted", "staged_bytes", "eager_forwards")
"""Counters of a server that are shown."""

NEAR_TIE = 0.5
"""Nats between plain SGLang's first two choices, below which bf16 may flip them."""

EVERY: Mapping[str, tuple[str, ...]] = {
    # A pool that fills an H200 would have 27 million slots of this model.
    "cuda": ("--dtype", "bfloat16", "--max-total-tokens", "262144"),
    "cpu": ("--chunked-prefill-size", "1024"),
}
"""Flags of every server, by device."""

TOY = ("--vericache-min-prompt", "64", "--vericache-staging-tokens", "4096")
TOY += ("--vericache-host-gb", "0.5")
"""Flags of a rehearsal's servers that draft."""

PLAIN = "plain"
PLANES = ("--vericache-compressor", "split-planes:exponent_bits=3,mantissa_bits=1")
SMALL_HOST = ("--vericache-host-gb", "4")
"""Host memory of servers that may run beside others."""

FLAGS: Mapping[str, tuple[str, ...]] = {
    PLAIN: ("--disable-vericache",),
    "default": (),
    "host": ("--vericache-residency", "host", *SMALL_HOST),
    "codec": ("--vericache-residency", "device", *PLANES, *SMALL_HOST),
    "eager": ("--disable-cuda-graph", *SMALL_HOST),
}
"""Servers by name, the most important ones first: flags after those of every one."""

REHEARSED = (PLAIN, "default", "host")

ABOUT = {
    PLAIN: "plain SGLang",
    "default": "VeriCache, default flags",
    "host": "residual KV in host memory",
    "codec": "codec split-planes",
    "eager": "default flags, no CUDA graphs",
}

ASKED = {PLAIN: (SHORT, LONG), "default": (SHORT, LONG, AGAIN)}
"""What servers are asked; those that are not here have the short prompt only."""


def checks(context: Context) -> list[Check]:
    """Return the checks, one for each server."""
    return [
        Check(
            name=name, about=ABOUT[name], run=partial(asked, name=name), seconds=420.0
        )
        for name in FLAGS
        if not context.on_cpu or name in REHEARSED
    ]


def asked(job: Job, *, name: str) -> None:
    """Ask a server; one that a question has ended or stuck is started again.

    Raises:
        NotMetError: Something is wrong with an answer, or there is none.
        ServerError: The server does not boot.
    """
    signal.signal(signal.SIGALRM, _time_is_up)
    up: OwnServer | None = job.serve(MODEL, flags(job.context, name))
    job.figures |= {"answers": {}, "rows": []}
    wrong = []
    for question in ASKED.get(name, (SHORT,)):
        row = {"asked": question, "result": "failed"}
        job.figures["rows"].append(row)
        try:
            up = up or job.serve(MODEL, flags(job.context, name))
            signal.alarm(ANSWER_SECONDS)
            _ask(job, up, name, row)
            row["result"] = "ok"
        except NotMetError as error:
            wrong.append(f"{question}: {error}")
        except Exception as error:  # noqa: BLE001 - one must not end the others
            lines = [f"{question}: {type(error).__name__}: {error}", *log_end(job.log)]
            wrong.append("\n".join(lines))
            if up is not None:
                up.close()
            up = None
        finally:
            signal.alarm(0)
    if wrong:
        raise NotMetError("\n".join(wrong))


def _time_is_up(*_: object) -> None:
    raise TimeoutError(f"no answer after {ANSWER_SECONDS} s")


def _ask(job: Job, up: OwnServer, name: str, row: dict[str, str]) -> None:
    """Ask what ``row`` says, and compare the answer with plain SGLang's."""
    question = row["asked"]
    long = LONG if question == LONG else SHORT
    body = request(job.context, long)
    if name == PLAIN:
        body |= {"return_logprob": True, "top_logprobs_num": 2}
    if question == AGAIN:
        up.generate(body)
    before = up.counters()
    answer = up.generate(body)
    told, ids, after = answer["meta_info"], answer["output_ids"], up.counters()
    shown = {key: told[f"{key}_tokens"] for key in ("prompt", "cached")}
    shown |= {key: after[key] - before[key] for key in COUNTED if key in after}
    row |= {key: str(value) for key, value in shown.items()}
    if len(ids) != OUTPUT:
        raise NotMetError(f"{len(ids)} tokens and not {OUTPUT}")
    if name == PLAIN:
        tops = told["output_top_logprobs"]
        margins = [first[0] - second[0] for first, second in tops]
        job.figures["answers"][question] = {"ids": ids, "margins": margins}
        return
    if question == AGAIN and not shown["cached"]:
        raise NotMetError("nothing was cached")
    if name in ("host", "codec") and not shown["cycles"]:
        raise NotMetError("nothing was drafted and verified")
    if name == "host" and not shown["staged_bytes"]:
        raise NotMetError("nothing was loaded from the host")
    right = (job.found(PLAIN, "answers") or {}).get(long)
    row["as plain"] = "plain did not answer" if right is None else compared(right, ids)
    if row["as plain"].startswith("no"):
        raise NotMetError(f"as plain SGLang: {row['as plain']}")


def flags(context: Context, name: str) -> list[str]:
    """Return the flags of a check's server."""
    drafts = name != PLAIN
    window = json.dumps({"max_position_embeddings": 40960})
    found = [*EVERY[context.device], "--json-model-override-args", window]
    found += TOY if drafts and context.on_cpu else ()
    found += FLAGS.get(name, ())
    return [*found, *backend_flags(context, drafts=drafts)]


def request(context: Context, prompt: str) -> dict[str, Any]:
    """Return the body of the greedy request for the short prompt or the long one."""
    from vericache_sglang.evaluation.workload import demo_requests

    length = LENGTHS[context.device][prompt]
    return demo_requests(MODEL, [length], OUTPUT, seed=1)[0].body(ends=False)


def compared(right: Mapping[str, Any], ids: Sequence[int]) -> str:
    """Return whether an answer is plain SGLang's, as far as bf16 can say: yes or no."""
    at = first_difference(right["ids"], ids)
    if at is None:
        return "yes"
    wanted, margin = right["ids"][at : at + 3], (right["margins"] + [0.0])[at]
    where = f"token {at} of {len(right['ids'])}, margin {margin:.2f}"
    if margin < NEAR_TIE:
        return f"up to a near tie at {where}"
    return f"no: {where}, {list(ids[at : at + 3])} for {wanted}"
