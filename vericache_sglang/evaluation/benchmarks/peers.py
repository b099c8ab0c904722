"""Systems of other papers on the same work: as settings of this server, measured.

Each verifies on the full KV in device memory; what a setting shares with its paper's
system, and what not, is in the table. Published figures stand beside ours with their
conditions; they are of other machines and models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vericache_sglang.evaluation.altered import LONGEST
from vericache_sglang.evaluation.benchmark import DEMO, Benchmark
from vericache_sglang.evaluation.benchmarks.divergence import FULL
from vericache_sglang.evaluation.benchmarks.pipeline1 import (
    SERVED,
    SPARSE_DRAFTS,
    lossless_systems,
    measure,
    ours,
    prepared,
)
from vericache_sglang.evaluation.inner_drafters import NEVER, chosen
from vericache_sglang.evaluation.pipeline_page import (
    draw_pipeline,
    measured,
    with_ratios,
)
from vericache_sglang.evaluation.report import markdown_table
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.tasks.catalog import TASKS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from vericache_sglang.evaluation.benchmark import Results
    from vericache_sglang.evaluation.systems import System


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A published system.

    Attributes:
        settings: VeriCache's that come nearest to it; without a compressor nothing is
            compressed.
        inner: Its inner drafter; "" for none.
        same: What they share with it.
        differs: What they do not.
        published: Its own figures.
        conditions: Of those figures.
    """

    settings: Mapping[str, Any]
    inner: str = ""
    same: str
    differs: str
    published: str
    conditions: str


MAGICDEC_DRAFTS = 3
"""Draft length of MagicDec's own command lines, in tokens."""

CHAIN = 4
"""Tokens that an inner drafter proposes in every row."""

PUBLISHED: Mapping[str, Peer] = {
    "MagicDec, StreamingLLM": Peer(
        settings={"compressor": "recency", "draft_length": MAGICDEC_DRAFTS},
        same="drafts on first and last tokens, verification on resident full KV",
        differs="its draft KV has a fixed size (256 tokens of 16,000) and moves along "
        "with the answer; here it is a share of the prompt, and every answer token",
        published="1.84x to 2.0x, later up to 2.51x; a draft is accepted with 0.84 at "
        "4K, 0.79 at 100K",
        conditions="8 A100; 2.51x: Llama-3.1-8B, batches of 32 to 256",
    ),
    "MagicDec, SnapKV": Peer(
        settings={"compressor": "snapkv", "draft_length": MAGICDEC_DRAFTS},
        same="drafts on what the prompt's last tokens attend to, selected once, "
        "verification on resident full KV",
        differs="the draft KV is a share of the prompt, not a fixed size",
        published="as above: the figures known here do not tell the two apart",
        conditions="as above",
    ),
    "QuantSpec": Peer(
        settings={"compressor": "kivi:bits=4", "draft_length": SPARSE_DRAFTS},
        same="4-bit drafts on every token, keys per channel, values per token, recent "
        "tokens exact, verification in device memory",
        differs="its 4 bits are the upper half of the 8 it verifies with and its "
        "weights are drafted with in 4 bits; here the codes lie beside the whole KV "
        "(more memory, exact verification), and weights are the model's. Its draft "
        "length is not known here",
        published="1.35x at 4K, 2.49x at 128K; accepted with 0.916 to 0.943; memory "
        "/ 1.3",
        conditions="batch 1",
    ),
    "SparseSpec": Peer(
        settings={"compressor": "snapkv", "draft_length": SPARSE_DRAFTS},
        same="sparse drafts of 8 over resident full KV, drafted and verified rows in "
        "one batch",
        differs="it selects again at every verification by that one's scores and reads "
        "the tokens in place; here they are selected once after the prompt and copied",
        published="2.13x; 6.16 of 8 accepted; in VeriCache's paper 1.82x at a KV "
        "budget of 0.74 of device memory, 1.02x at 0.2",
        conditions="H100, batch 256, over vLLM; VeriCache's paper: RTX PRO "
        "6000, Qwen-8B to Qwen-32B",
    ),
    "TriForce": Peer(
        settings={
            "compressor": "snapkv",
            "draft_length": SPARSE_DRAFTS,
            "inner_length": CHAIN,
        },
        inner="model",
        same="two levels: a small model over a window of first and last tokens "
        "proposes, a selected part of the KV checks its proposals, the full KV "
        "verifies",
        differs="its retrieval KV is selected anew, here tokens are selected once "
        "after the prompt; its small model is trained on long text, here it is one of "
        f"0.11M parameters; drafts of {SPARSE_DRAFTS}, chains of {CHAIN} in every row, "
        "its own lengths are not known here",
        published="2.31x; 7.78x with offloading",
        conditions="A100 at 122K; 7.78x: two RTX 4090, batch 1",
    ),
    "EAGLE3": Peer(
        settings={"inner_length": CHAIN},
        inner="eagle3",
        same="a head trained for the model proposes from the outputs of three of its "
        "layers, verification on resident full KV, nothing compressed",
        differs=f"chains of {CHAIN}, no trees; the head attends to the last 512 "
        "tokens, and of what came from the prefix cache, as prompts here do, only to "
        "the last 64: it foresees less until an answer has some dozen. SGLang's own "
        "EAGLE3 needs a GPU: `bench --system`",
        published="1 to 2 drafts accepted; 0.81x at long contexts",
        conditions="VeriCache's paper, Qwen-32B and Llama-70B; 0.81x: in HOWL's paper",
    ),
}
"""By the name of the row."""

PAPER = {
    "VeriCache": ("1.92x to 2.73x; 19 to 23 of 30 accepted", "the paper, pipeline 1"),
}
"""Published figures of further rows: figures and conditions."""


def systems_of(options: argparse.Namespace) -> list[System]:
    """Return VeriCache and the peers that the model has the drafters of.

    Peers draft and propose as many tokens as their settings say, whatever that costs.
    """
    same = {"keep": options.keep, "residency": "device"}
    inner = {each.inner: each for each in chosen(options)[0]}
    found = [each for each in lossless_systems(options) if each.name == "VeriCache"]
    for name, peer in PUBLISHED.items():
        settings = {"min_prompt": NEVER, **peer.settings}
        if "compressor" in settings:
            settings = ours(options, **same, **peer.settings)
        if not peer.inner:
            system = described(name, settings, about=peer.same)
        elif peer.inner in inner:
            system = inner[peer.inner].under(settings, name, peer.same)
        else:
            continue
        found.append(replace(system, alteration=LONGEST))
    return found


def page(report: Mapping[str, Any]) -> str:
    """Return the Markdown page of a report; rows may be missing."""
    rows = {row["name"]: row for row in with_ratios(report.get("rows", []))}
    published = {
        FULL: ("", ""),
        **PAPER,
        **{name: (peer.published, peer.conditions) for name, peer in PUBLISHED.items()},
    }
    cells = [[name, _ours(rows.get(name)), *each] for name, each in published.items()]
    faithful = [[name, peer.same, peer.differs] for name, peer in PUBLISHED.items()]
    titles = ["system", "here (MEASURED)", "published", "conditions"]
    parts = [
        "# Systems of other papers on the same work (MEASURED)",
        markdown_table(titles, cells),
        "Published figures are other machines', models' and baselines': they stand "
        "beside ours and are not compared with them.",
        "## How faithful the settings are",
        markdown_table(["system", "the same", "different"], faithful),
        *measured(report),
    ]
    return "\n\n".join(parts) + "\n"


def _ours(row: Mapping[str, Any] | None) -> str:
    if row is None or "error" in row or not row["ratio"]:
        return "not measured"
    parts = [f"{row['ratio']['median']:.2f}x"]
    if row["accepted_per_verify"] is not None:
        parts.append(f"{row['accepted_per_verify']:.1f} accepted a verification")
    if row["proposals_per_row"] is not None:
        parts.append(f"{row['proposals_per_row']:.1f} proposals accepted a row")
    return ", ".join(parts)


def _measure(options: argparse.Namespace, results: Results) -> None:
    study = prepared(options, results, {})
    measure(study, systems_of(options), results)
    if options.out:
        draw_pipeline(results.write(), options.out.with_suffix(".svg"))


PEERS = Benchmark(
    about="MagicDec, QuantSpec, SparseSpec, TriForce and EAGLE3 as settings of this "
    "server, beside plain SGLang and VeriCache, with their published figures. Fails "
    "where an answer is not the full KV's.",
    model=DEMO,
    options={
        "compressor": ("snapkv", "of VeriCache, as --vericache-compressor"),
        "keep": (0.25, "share of tokens of every selector"),
        "draft-length": (25, "tokens, of VeriCache"),
        **SERVED,
        "drafters": (["eagle3", "model"], SERVED["drafters"][1]),
        "samples": (2, SERVED["samples"][1]),
        "context": (5000, SERVED["context"][1]),
        "output": (128, SERVED["output"][1]),
        "kl-tokens": (64, SERVED["kl-tokens"][1]),
        "rates": ([0.5, 1.0, 2.0], SERVED["rates"][1]),
        "tasks": ([name for name in TASKS if not TASKS[name].listed], "data sets"),
    },
    measure=_measure,
    page=page,
)
