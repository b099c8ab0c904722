"""Keep tokens that a small regressor on hidden states scores highest (KVzap)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch

from vericache_sglang.compression.about import About
from vericache_sglang.compression.base import SELECTORS, Needs, Seen, Selector, Step
from vericache_sglang.compression.kvzap_weights import Scorer, read_weights
from vericache_sglang.errors import CompressionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.compression.base import Services


@SELECTORS.register("kvzap")
class KVzap(Selector):
    """Per layer, a linear map or a small MLP from an attention input to head scores.

    A score estimates the natural logarithm of the token's KVzip+ score: the largest
    attention that a repetition of the prompt would pay it (arXiv:2601.07891). It
    depends on the token alone, so it is computed while the token is run, stored with
    its KV, and needs no further forward.

    With a threshold the kept share depends on the prompt (``keep_share``). The paper
    always keeps the last 128 tokens, and no first ones; here the runtime's
    ``recent_tokens`` and ``sink_tokens`` decide which tokens are protected.

    Args:
        seed: Unused; the method is deterministic.
        weights: Folder of a checkpoint trained on the served model: a published one
            (``nvidia/KVzap-*``), or one of ``scripts/train_kvzap.py``.
        threshold: Score below which a token is dropped, a natural logarithm; it
            depends on the model (the published example for Qwen3-8B has -4). NaN: the
            configured share of highest scores is kept.

    Raises:
        CompressionError: ``weights`` is given and cannot be read.
    """

    needs: ClassVar[Needs] = Needs(keys=False, hidden=True)
    about: ClassVar[About] = About(
        paper="KVzap, arXiv:2601.07891",
        licence="Apache-2.0 (NVIDIA/kvpress, nvidia/KVzap-*); no code shared",
    )

    def __init__(
        self, seed: int = 0, *, weights: str = "", threshold: float = math.nan
    ) -> None:
        super().__init__(seed)
        self._threshold = threshold
        self._weights = read_weights(weights) if weights else None
        self._layers: list[Scorer] = []

    def bind(self, services: Services) -> None:
        """See ``Selector.bind``.

        Raises:
            CompressionError: Weights are missing, or were trained on another model.
        """
        spec, weights = services.spec, self._weights
        if weights is None:
            raise CompressionError(
                "kvzap: option 'weights' must name the folder of a checkpoint trained "
                f"on {spec.name or 'the served model'}; scripts/train_kvzap.py "
                "makes one"
            )
        heads = spec.all_kv_heads or spec.kv_heads
        for field, found, wanted, meaning in (
            ("input_dim", weights.input_dim, spec.hidden_size, "hidden size"),
            ("output_dim", weights.output_dim, heads, "KV heads"),
            ("n_modules", len(weights.layers), spec.layers, "layers"),
        ):
            if found != wanted:
                raise CompressionError(
                    f"{weights.path / 'config.json'}: {field!r} is {found}, but the "
                    f"{meaning} of {spec.name or 'the served model'} is {wanted}: "
                    "trained on another model"
                )
        first = spec.first_kv_head
        own = slice(first, first + spec.kv_heads)
        self._layers = [layer.heads(own) for layer in weights.layers]

    def update(self, step: Step) -> torch.Tensor:
        """See ``Selector.update``; returns [H, n] float32, one score per token.

        The final map is in float32 on every device. An MLP's inner map is in the dtype
        of ``step.hidden`` on a GPU, and in float32 on a CPU, where products in half
        precision are slow.

        Raises:
            CompressionError: ``step.hidden`` is None, or ``bind`` was not called.
        """
        hidden = step.hidden
        if hidden is None:
            raise CompressionError("kvzap: the attention inputs are missing")
        if not self._layers:
            raise CompressionError("kvzap: bind was not called")
        # The device is known only now; each layer is moved once.
        layer = _placed(self._layers[step.layer], hidden)
        self._layers[step.layer] = layer
        return layer.score(hidden)

    @property
    def follows_keep(self) -> bool:
        """See ``Selector.follows_keep``; true without a threshold."""
        return math.isnan(self._threshold)

    def keep_share(self, noted: Sequence[torch.Tensor]) -> float | None:
        """See ``Selector.keep_share``; None without a threshold.

        The mean over layers and heads of the share at or above the threshold, so the
        total of kept entries equals that of per-head counts. Tokens without a score
        count as kept; tokens that the runtime protects are not added.

        Args:
            noted: Per layer, [H, T]; empty: nothing was scored, so all is kept.
        """
        if self.follows_keep:
            return None
        if not noted:
            return 1.0
        # Not `>=`: NaN, a token without a score, counts as kept.
        kept = torch.stack([(~(each < self._threshold)).sum() for each in noted]).sum()
        entries = sum(each.numel() for each in noted)
        return max(1, int(kept)) / max(1, entries)

    def scores(
        self,
        rid: str,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: Seen,
    ) -> torch.Tensor:
        """See ``Selector.scores``; the scores that ``update`` returned.

        Tokens without a score rank above all others, so they are kept. The budget would
        rank their NaN below all.

        Raises:
            CompressionError: ``seen.noted`` is None.
        """
        if seen.noted is None:
            raise CompressionError("kvzap: the prompt's scores are missing")
        return torch.where(seen.noted.isnan(), torch.inf, seen.noted)


def _placed(layer: Scorer, hidden: torch.Tensor) -> Scorer:
    """Return ``layer`` on the device of ``hidden``, in the dtype that scores it."""
    device, inner = hidden.device, layer.inner
    if inner is not None:
        inner = inner.to(device, hidden.dtype if hidden.is_cuda else torch.float32)
    return Scorer(layer.final.to(device, torch.float32), inner)
