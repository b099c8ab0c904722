"""Model access for selectors and codecs: shapes, RoPE, weights and tokenizer."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from vericache_sglang.compression.base import ModelSpec
from vericache_sglang.errors import CompressionError
from vericache_sglang.kv.prefill_observer import attention_parents


class ModelServices:
    """See ``compression.base.Services``; reads SGLang's modules on demand.

    Args:
        model_runner: SGLang's runner of the target model.
        server_args: Names the tokenizer.
    """

    def __init__(self, model_runner: Any, server_args: Any) -> None:
        self._runner = model_runner
        self._args = server_args
        self._layers = attention_parents(model_runner.model)
        layer = self._layers[0][0]
        config = model_runner.model_config
        self._spec = ModelSpec(
            layers=len(self._layers),
            query_heads=layer.tp_q_head_num,
            kv_heads=layer.tp_k_head_num,
            head_dim=layer.qk_head_dim,
            hidden_size=config.hidden_size,
            name=str(server_args.model_path),
            all_kv_heads=config.get_total_num_kv_heads(),
            # If there are more ranks than KV heads, ranks replicate heads.
            first_kv_head=model_runner.tp_rank
            * config.get_total_num_kv_heads()
            // model_runner.tp_size,
        )

    @property
    def spec(self) -> ModelSpec:
        """See ``Services.spec``."""
        return self._spec

    def rope(
        self, keys: torch.Tensor, positions: torch.Tensor, *, inverse: bool = False
    ) -> torch.Tensor:
        """See ``Services.rope``; uses SGLang's table of cosines and sines.

        The table includes any scaling (YaRN, Llama 3) and its amplitude. It ends a
        little past the model's context. Later positions, which only predicted queries
        have, take two rotations: to the last row, then by the remainder.

        Raises:
            IndexError: A position is more than twice the table's last one.
        """
        table, interleaved = self._rotation
        cosine, sine = _turns(table, positions.to(table.device, torch.int64))
        cosine, sine = cosine.to(keys.device), sine.to(keys.device)
        if inverse:
            length = cosine.square() + sine.square()
            cosine, sine = cosine / length, -sine / length
        width = 2 * cosine.shape[-1]
        turned, rest = keys[..., :width], keys[..., width:]
        if interleaved:
            left, right = turned[..., 0::2], turned[..., 1::2]
        else:
            left, right = turned.chunk(2, dim=-1)
        pair = (left * cosine - right * sine, right * cosine + left * sine)
        if interleaved:
            return torch.cat([torch.stack(pair, -1).flatten(-2), rest], dim=-1)
        return torch.cat([*pair, rest], dim=-1)

    def output_weight(self, layer: int) -> torch.Tensor:
        """See ``Services.output_weight``.

        Raises:
            CompressionError: The attention module has no unquantized ``o_proj``.
        """
        projection = getattr(self._layers[layer][1], "o_proj", None)
        weight = getattr(projection, "weight", None)
        spec = self._spec
        width = spec.query_heads * spec.head_dim
        if weight is None or weight.dim() != 2 or weight.shape[1] != width:
            raise CompressionError(
                f"{spec.name}: layer {layer} has no o_proj.weight of [d, {width}], "
                "which the compression method needs (a quantized model?)"
            )
        whole: torch.Tensor = weight.detach().t()
        return whole.reshape(spec.query_heads, spec.head_dim, -1)

    def encode(self, text: str) -> list[int]:
        """See ``Services.encode``."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    @cached_property
    def _tokenizer(self) -> Any:
        from sglang.srt.utils.hf_transformers_utils import get_tokenizer

        args = self._args
        return get_tokenizer(
            args.tokenizer_path or args.model_path,
            tokenizer_mode=args.tokenizer_mode,
            trust_remote_code=args.trust_remote_code,
        )

    @cached_property
    def _rotation(self) -> tuple[torch.Tensor, bool]:
        """Return cosines and sines [positions, rotated elements], and their pairing.

        Raises:
            CompressionError: The attention module does not use SGLang's RoPE.
        """
        rotary: Any = getattr(self._layers[0][1], "rotary_emb", None)
        table = getattr(rotary, "cos_sin_cache", None)
        if not isinstance(table, torch.Tensor):
            raise CompressionError(
                f"{self._spec.name}: the attention has no rotary embedding with a "
                "table of cosines, which the compression method needs"
            )
        return table, not rotary.is_neox_style


def _turns(
    table: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Look up cosines and sines [..., rotated elements / 2], float32, of positions.

    Both rotations are applied to every position: checking whether the second is needed
    would synchronise with the GPU in every layer of every prefill. For positions inside
    the table the second rotation is the identity (cosine 1, sine 0).
    """
    last = len(table) - 1
    cosine, sine = table[positions.clamp(max=last)].float().chunk(2, dim=-1)
    on_cosine, on_sine = table[(positions - last).clamp(min=0)].float().chunk(2, dim=-1)
    # Row 0 does not rotate: its cosines are the amplitude (YaRN), else 1.
    amplitude = table[0, : cosine.shape[-1]].float()
    on_cosine, on_sine = on_cosine / amplitude, on_sine / amplitude
    return (
        cosine * on_cosine - sine * on_sine,
        sine * on_cosine + cosine * on_sine,
    )
