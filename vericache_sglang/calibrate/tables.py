"""Calibrate KVQuant and RotateKV on a model."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from vericache_sglang.calibrate.cache import KV, RecordingCache
from vericache_sglang.compression.codecs import kvquant_tables, rotatekv_tables
from vericache_sglang.compression.codecs.kvquant_tables import KVQuantTables, Samples
from vericache_sglang.compression.codecs.rotatekv import massive_slots
from vericache_sglang.compression.codecs.rows import as_rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vericache_sglang.calibrate.subject import Subject
    from vericache_sglang.compression.codecs.rotatekv_tables import RotateKVTables

GROUPED_HEADS = 4
"""KV heads that RotateKV's presets rotate together."""


class LayerRows(NamedTuple):
    """KV rows of one layer for sampled tokens, over all heads, float32 on the CPU.

    Attributes:
        keys: [N, H * D] before RoPE.
        values: [N, H * Dv].
        key_weights: [N, H * D], squared gradients of the loss, or ones.
        value_weights: As ``key_weights``.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_weights: torch.Tensor
    value_weights: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Selection of calibration tokens.

    Attributes:
        rows: Maximum tokens of each layer, over all prompts.
        sinks: Number of first tokens of each prompt to leave out.
        massive: Leave out the tokens of massive activations instead, layer by layer.
        gradients: Weight numbers by squared gradients of the loss; otherwise equally.
        seed: Seed of the draw where there are more than ``rows`` tokens.
    """

    rows: int
    sinks: int = 0
    massive: bool = False
    gradients: bool = False
    seed: int = 0


def kvquant(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    out: Path,
    sampling: Sampling,
    *,
    bits: int,
    outliers: float,
) -> KVQuantTables:
    """Find KVQuant's thresholds and code books and write them to ``out``.

    Args:
        prompts: Token ids.
        out: Path of the calibration file.
        sampling: The paper weights by gradients (section 3.2 of arXiv:2401.18079).
        bits: Width of a code, 1 to 8.
        outliers: Share of numbers beyond the thresholds, in [0, 1).

    Raises:
        UnsupportedError: The model's KV layout or rotary embedding is not supported.
        CompressionError: Numbers are not finite, or the file cannot be written.
    """
    model = subject.model()
    found = [
        kvquant_tables.calibrate_layer(
            Samples(rows.keys, rows.key_weights),
            Samples(rows.values, rows.value_weights),
            bits,
            outliers,
        )
        for rows in collect(subject, prompts, sampling)
    ]
    notes = _notes(prompts, sampling)
    return kvquant_tables.write_tables(out, found, outliers, model, notes)


def rotatekv(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    out: Path,
    sampling: Sampling,
    together: int | None = None,
) -> RotateKVTables:
    """Find RotateKV's order of the rotated key channels and write it to ``out``.

    Args:
        prompts: Token ids.
        out: Path of the calibration file.
        sampling: The official calibration leaves massive activations out.
        together: KV heads to rotate together; None: 4 as in the official presets, or
            the largest power of two below that divides the model's heads.

    Raises:
        UnsupportedError: The model's KV layout or rotary embedding is not supported.
        CompressionError: ``together`` does not divide the heads, or the file cannot be
            written.
    """
    model = subject.model()
    if together is None:
        together = next(n for n in (GROUPED_HEADS, 2, 1) if model.kv_heads % n == 0)
    orders = [
        rotatekv_tables.calibrate_order(rows.keys, model.head_dim, together)
        for rows in collect(subject, prompts, sampling)
    ]
    notes = _notes(prompts, sampling)
    return rotatekv_tables.write_tables(out, orders, together, model, notes)


def collect(
    subject: Subject, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[LayerRows]:
    """Run prompts and return the KV rows of sampled tokens of every layer.

    Args:
        prompts: Token ids, two or more each if gradients are used.
        sampling: Selection of the tokens.

    Returns:
        One entry per layer; every prompt contributes the same number of rows, or all
        it has.
    """
    rope = subject.rope()
    generator = torch.Generator().manual_seed(sampling.seed)
    share = max(1, sampling.rows // len(prompts))
    found: list[list[LayerRows]] = []
    for prompt in prompts:
        layers, gradients, inputs = _run(subject, prompt, sampling)
        positions = torch.arange(len(prompt))
        for index, (kv, gradient) in enumerate(zip(layers, gradients, strict=True)):
            if index == len(found):
                found.append([])
            kept = _kept(len(prompt), inputs[index] if inputs else None, sampling)
            kept = kept[torch.randperm(len(kept), generator=generator)[:share]]
            parts = (
                rope(kv.keys, positions, inverse=True),
                kv.values,
                # Undoing RoPE rotates gradients as it rotates keys.
                rope(gradient.keys, positions, inverse=True).square(),
                gradient.values.square(),
            )
            if not sampling.gradients:
                parts = (
                    *parts[:2],
                    torch.ones_like(kv.keys),
                    torch.ones_like(kv.values),
                )
            found[index].append(LayerRows(*(as_rows(part)[kept] for part in parts)))
    return [
        LayerRows(*(torch.cat(column) for column in zip(*layer, strict=True)))
        for layer in found
    ]


def _run(
    subject: Subject, prompt: Sequence[int], sampling: Sampling
) -> tuple[list[KV], list[KV], list[torch.Tensor]]:
    """Return KV and gradients of every layer, float32 on the CPU, and layer inputs.

    Without gradients the KV stands in for them, unused.
    """
    ids = torch.tensor([list(prompt)], device=subject.like.device)
    cache = RecordingCache()
    with contextlib.ExitStack() as stack:
        options = {"output_hidden_states": sampling.massive}
        if sampling.gradients:
            # No weight wants a gradient, so the graph begins at the embeddings.
            embedded = subject.net.get_input_embeddings()(ids).detach()
            given = {"inputs_embeds": embedded.requires_grad_()}
        else:
            stack.enter_context(torch.no_grad())
            given = {"input_ids": ids}
        output = subject.net(**given, past_key_values=cache, use_cache=True, **options)
    seen = [cache.seen[index] for index in sorted(cache.seen)]
    gradients = seen
    if sampling.gradients:
        loss = functional.cross_entropy(output.logits[0, :-1].float(), ids[0, 1:])
        loss.backward()
        gradients = [KV(_gradient(kv.keys), _gradient(kv.values)) for kv in seen]
    inputs = [h[0].detach().float().cpu() for h in output.hidden_states or ()]
    return _on_cpu(seen), _on_cpu(gradients), inputs


def _gradient(states: torch.Tensor) -> torch.Tensor:
    """Return a gradient; zeros where nothing depends on the states."""
    return torch.zeros_like(states) if states.grad is None else states.grad


def _on_cpu(layers: Sequence[KV]) -> list[KV]:
    """Return [H, T, D] float32 on the CPU."""
    return [KV(*(part[0].detach().float().cpu() for part in kv)) for kv in layers]


def _kept(tokens: int, hidden: torch.Tensor | None, sampling: Sampling) -> torch.Tensor:
    """Return the slots that are not sinks."""
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[: sampling.sinks] = False
    if hidden is not None:
        mask[massive_slots(hidden)] = False
    return mask.nonzero()[:, 0]


def _notes(prompts: Sequence[Sequence[int]], sampling: Sampling) -> dict[str, str]:
    """Return metadata that describes the calibration data."""
    return {
        "prompts": str(len(prompts)),
        "prompt_tokens": str(sum(len(prompt) for prompt in prompts)),
        "rows": str(sampling.rows),
        "weights": "squared gradients" if sampling.gradients else "equal",
    }
