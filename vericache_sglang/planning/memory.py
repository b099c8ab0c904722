"""Device memory of a server: every tensor, its formula, and the rest for KV.

SGLang 0.5.21 gives the KV pool the memory that is free after the weights are loaded,
less a reserve of ``1 - mem_fraction_static`` of the device for CUDA graphs and
activations. All other tensors allocated after the pool (block tables, logits buffer,
page tables, scratch) are subtracted from the pool by our hook on
``_profile_available_bytes`` (patches: mem_cache_kv_cache_budget), with the formulas of
this file and of ``memory_rows.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from vericache_sglang.config.schema import resolve_staging
from vericache_sglang.planning.block_table import block_table_shape
from vericache_sglang.planning.graph_sizes import most_tokens
from vericache_sglang.planning.memory_rows import ROWS, MemoryRow, Phase, row_bytes
from vericache_sglang.planning.sglang_memory import block_table_width

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.planning.models import ModelShape

MIB = 2**20
GIB = 2**30

DEFAULT_RUNNING = 64
"""Default of ``--max-running-requests`` on a GPU. SGLang's is 48 for its own
speculative algorithms and 2,048 or more for a custom one; the block table, the graphs
and their logits are sized by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The model, GPU and flags on which device memory depends.

    Attributes:
        model: Shape of the model.
        config: Settings of VeriCache.
        gpu_mib: Memory of one GPU, in MiB, as nvidia-smi reports it.
        fraction: ``--mem-fraction-static``, in (0, 1).
        ranks: Tensor-parallel ranks.
        context: Longest context, in tokens.
        page: Page size, in KV slots.
        running: ``--max-running-requests``.
        chunk: Tokens of a prefill chunk.
        backend: Attention backend: fa3, trtllm_mha or vericache.
        graph_rows: Rows of the largest decode graph; 0 without graphs.
        prefill_graphs: Captured sizes of prefill graphs; 0 without graphs.
        most_slots: ``--max-total-tokens``; None: no limit.
        kept: Largest draft KV, as a share of a prompt.
        packed: Whether draft KV is packed, so that a verification loads all of it.
        tail: Last queries of a prompt that the compressor needs, in tokens.
        scored: Whether the compressor stores a score for every slot.
        draft: Shape of the small model or head of an inner drafter; None without one.
    """

    model: ModelShape
    config: VeriCacheConfig
    gpu_mib: float
    fraction: float
    context: int
    running: int
    chunk: int
    backend: str
    graph_rows: int
    prefill_graphs: int = 0
    ranks: int = 1
    page: int = 1
    most_slots: int | None = None
    kept: float
    packed: bool = False
    tail: int = 0
    scored: bool = False
    draft: ModelShape | None = None

    @property
    def graph_tokens(self) -> int:
        """Tokens of the largest decode graph; 0 without graphs."""
        if not self.graph_rows:
            return 0
        config = self.config
        return most_tokens(
            self.graph_rows,
            config.draft_length,
            config.max_verifies,
            config.proposals,
        )

    @property
    def slot_bytes(self) -> int:
        """Bytes of a KV slot on one GPU."""
        return self._slot_bytes_of(self.model)

    @property
    def _feature_bytes(self) -> int:
        """Bytes of what an EAGLE3 head reads of a token; 0 without one."""
        if self.draft is None or not self.config.inner_head:
            return 0
        return self.draft.states * self.model.hidden * self.draft.element_bytes

    def _slot_bytes_of(self, shape: ModelShape) -> int:
        return shape.kv_bytes_per_token // self._kv_ranks(shape)

    def _kv_ranks(self, shape: ModelShape) -> int:
        """Return the ranks among which KV heads are divided; others repeat them."""
        return min(self.ranks, shape.kv_heads)

    def staging(self, pool: int | None) -> int:
        """Return the staging buffer's slots, out of ``pool`` slots."""
        exact = 0.0 if self.packed else None
        return resolve_staging(self.config, self.context, exact, pool)

    def symbols(self, slots: int, staging: int) -> dict[str, float]:
        """Return the values of the formulas' symbols.

        Args:
            slots: SGLang's slots in the KV pool.
            staging: Slots of the staging buffer, after SGLang's.
        """
        model, config = self.model, self.config
        drafts, verifies = config.most_drafts, config.max_verifies
        width = block_table_width(self.context, self.page, drafts)
        table = block_table_shape(config, self.running, width, self.page, self.kept)
        return {
            "MiB": MIB,
            "GiB": GIB,
            "weights": model.weight_bytes,
            "draft_weights": self.draft.weight_bytes if self.draft else 0,
            "draft_token": self._slot_bytes_of(self.draft) if self.draft else 0,
            "ring": config.ring_slots,
            "reach": config.ring_reach,
            "features": self._feature_bytes,
            "window": config.inner_window,
            "ranks": self.ranks,
            "layers": model.layers,
            "heads": model.heads // self.ranks,
            "kv_heads": model.kv_heads // self._kv_ranks(model),
            "head_dim": model.head_dim,
            "hidden": model.hidden,
            "mlp": model.mlp // self.ranks,
            "vocab": model.vocab,
            "positions": model.positions,
            "number": model.element_bytes,
            "context": self.context,
            "page": self.page,
            "pages": ceil(self.context / self.page),
            "rows": table.rows,
            "columns": table.width,
            "running": self.running,
            "mixed": most_tokens(
                self.running, config.draft_length, verifies, config.proposals
            ),
            "chunk": self.chunk,
            "drafts": drafts,
            "proposals": config.proposals,
            "corpus": config.inner_corpus,
            "min_prompt": config.min_prompt,
            "kept": self.kept,
            "tail": self.tail,
            "scored": self.scored,
            "graph_rows": self.graph_rows,
            "graph_tokens": self.graph_tokens,
            "prefill_graphs": self.prefill_graphs,
            "slots": slots,
            "staging": staging,
        }


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """The device memory of one GPU, tensor by tensor.

    Attributes:
        deployment: The deployment it was computed for.
        slots: SGLang's slots in the KV pool; 0 if none fits.
        staging: Slots of the staging buffer.
        sizes: Bytes of every nonzero row, in the order of ``ROWS``.
    """

    deployment: Deployment
    slots: int
    staging: int
    sizes: Mapping[MemoryRow, int]

    @property
    def free_bytes(self) -> int:
        """Bytes left when all rows are allocated at once; may be negative."""
        return int(self.deployment.gpu_mib * MIB) - sum(self.sizes.values())

    @property
    def missing_bytes(self) -> int:
        """Bytes missing to serve a prefill; 0 if the device is large enough."""
        passing = (b for row, b in self.sizes.items() if row.phase is Phase.PASSING)
        return max(0, -self.free_bytes - sum(passing))


def subtracted_bytes(deployment: Deployment, budget: int) -> int:
    """Return the bytes of ``budget`` that are not available for KV slots.

    Args:
        deployment: Model and flags; its GPU is ignored.
        budget: Bytes of the KV pool without the hook.
    """
    total = max(0, budget) // deployment.slot_bytes
    symbols = deployment.symbols(total, deployment.staging(total))
    rows = _rows(deployment, Phase.SUBTRACTED)
    return sum(row_bytes(row, symbols) for row in rows)


def ledger(deployment: Deployment) -> MemoryLedger:
    """Return all rows, with the KV pool that SGLang and our hook allocate."""
    symbols = deployment.symbols(0, 0)
    loaded = sum(row_bytes(row, symbols) for row in _rows(deployment, Phase.LOADED))
    context = row_bytes(ROWS[0], symbols)
    # SGLang takes its share of the memory free after creating the CUDA context.
    reserve = int((deployment.gpu_mib * MIB - context) * (1 - deployment.fraction))
    budget = int(deployment.gpu_mib * MIB) - loaded - reserve
    budget -= subtracted_bytes(deployment, budget)
    total = max(0, budget) // deployment.slot_bytes
    staging = deployment.staging(total)
    slots = max(0, total - staging) // deployment.page * deployment.page
    if deployment.most_slots is not None:
        slots = min(slots, deployment.most_slots // deployment.page * deployment.page)
    symbols = deployment.symbols(slots, staging)
    sizes = {row: row_bytes(row, symbols) for row in _rows(deployment)}
    taken = {row: size for row, size in sizes.items() if size}
    return MemoryLedger(deployment, slots, staging, taken)


def _rows(deployment: Deployment, phase: Phase | None = None) -> Iterator[MemoryRow]:
    for row in ROWS:
        if phase in (None, row.phase) and row.backend in ("", deployment.backend):
            yield row


def shortage(found: MemoryLedger) -> str | None:
    """Return why a device is too small, with remedies; None if it is large enough.

    The KV pool must hold one prefill chunk, and the reserve a prefill's activations.
    """
    at, missing = found.deployment, found.missing_bytes
    least = min(at.chunk, at.context, at.most_slots or at.context)
    if found.slots >= least and not missing:
        return None
    what = f"the KV pool holds {found.slots} tokens, a prefill chunk has {least}"
    if missing:
        what = f"{_size(missing)} are missing where a prefill runs"
    fraction = "lower" if missing else "raise"
    rows = sorted(found.sizes, key=found.sizes.__getitem__, reverse=True)
    largest = [row for row in rows if row.remedy][:4]
    lines = (
        f"\n  {row.name}: {_size(found.sizes[row])}, {row.remedy}" for row in largest
    )
    return (
        f"a GPU of {at.gpu_mib * MIB / GIB:.1f} GiB is too small for {at.model.name} "
        f"with these flags: {what}. The largest tensors that flags make smaller:"
        f"{''.join(lines)}\nor {fraction} --mem-fraction-static, now {at.fraction:g}"
    )


def memory_table(found: MemoryLedger) -> str:
    """Return the ledger as text: rows by phase, formulas, sources and symbols."""
    at = found.deployment
    whole = at.gpu_mib * MIB / GIB
    lines = [
        f"Device memory of {at.model.name}, {whole:.1f} GiB a GPU: context "
        f"{at.context}, {at.running} running requests, prefill chunks of {at.chunk}, "
        f"attention backend {at.backend}, --mem-fraction-static {at.fraction:g}",
    ]
    for phase in Phase:
        rows = {row: size for row, size in found.sizes.items() if row.phase is phase}
        lines.append(f"\n{_size(sum(rows.values())):>12}  {phase.value}")
        lines += [
            f"{_size(size):>12}    {row.name} = {row.formula}\n{'':20}{row.source}"
            for row, size in rows.items()
        ]
    lines.append(f"\n{_size(found.free_bytes):>12}  left with all of it at once")
    lines.append(
        f"\nThe KV pool holds {found.slots} tokens, the staging buffer "
        f"{found.staging}. Symbols:"
    )
    symbols = at.symbols(found.slots, found.staging)
    used = set(re.findall(r"\w+", " ".join(row.formula for row in found.sizes)))
    values = (f"{name} = {symbols[name]:.12g}" for name in symbols if name in used)
    lines.append(", ".join(values))
    return "\n".join(lines)


def memory_overview(found: Mapping[str, MemoryLedger]) -> str:
    """Return ledgers side by side as Markdown, by phase; the keys are titles."""
    rows = {"": list(found)}
    of = {title: one.deployment for title, one in found.items()}
    rows["one GPU"] = [_size(int(at.gpu_mib * MIB)) for at in of.values()]
    rows["context, tokens"] = [f"{at.context:,}" for at in of.values()]
    for phase in Phase:
        rows[phase.value] = [
            _size(sum(b for row, b in one.sizes.items() if row.phase is phase))
            for one in found.values()
        ]
    rows["left with all of it at once"] = [_size(o.free_bytes) for o in found.values()]
    rows["KV pool, tokens"] = [f"{one.slots:,}" for one in found.values()]
    rows["staging buffer, tokens"] = [f"{one.staging:,}" for one in found.values()]
    lines = [f"| {' | '.join([name, *cells])} |" for name, cells in rows.items()]
    return "\n".join([lines[0], "|---" + "|---:" * len(found) + "|", *lines[1:]])


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if abs(count) >= GIB else f"{count / MIB:.2f} MiB"
