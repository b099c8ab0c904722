"""KIVI: keys quantized per channel, values per token (arXiv:2402.02750)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch

from vericache_sglang.compression.about import About
from vericache_sglang.compression.codecs.base import (
    CODECS,
    Codec,
    CodecNeeds,
    Layout,
    PartShape,
    PartSpec,
    Source,
    Tensors,
    check_kv,
)
from vericache_sglang.compression.codecs.packing import pack, packed_bytes, unpack
from vericache_sglang.errors import CompressionError


@CODECS.register("kivi")
@dataclass(frozen=True)
class KIVI(Codec):
    """Quantization with minimum and step per group; the last tokens stay exact.

    Post-RoPE keys are quantized in groups of ``group`` tokens of one channel, values in
    groups of ``group`` channels of one token: ``x = code * step + minimum``, with
    ``step = (maximum - minimum) / (2**bits - 1)`` (section 3 of the paper). Steps and
    minima have the dtype of the KV. The last ``T mod window`` keys and the last
    ``window`` values are exact, so keys have no exact tail right after a flush.
    Codes are rounded against the step as stored, which the official code does too; it
    divides 0 by 0 in a constant group, where ours are 0 and the minimum is exact.

    Attributes:
        bits: Width of a code, 2 to 8; the paper has 2 and 4.
        group: g, tokens (keys) or channels (values) that share step and minimum.
        window: R, exact recent tokens, a multiple of ``group``; 0: no token is exact,
            and tokens must fill whole groups.

    Raises:
        CompressionError: A parameter is out of its bounds.
    """

    name: ClassVar[str] = "kivi"
    about: ClassVar[About] = About(
        paper="KIVI, arXiv:2402.02750",
        kind="quantize",
        licence="MIT (jy-yuan/KIVI)",
    )

    bits: int = 2
    group: int = 32
    window: int = 32

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise CompressionError(f"kivi: bits must be 2 to 8, got {self.bits}")
        if self.group < 1:
            raise CompressionError(f"kivi: group must be >= 1, got {self.group}")
        if self.window < 0 or self.window % self.group:
            raise CompressionError(
                f"kivi: window must be 0 or a multiple of group {self.group}, "
                f"got {self.window}"
            )

    @property
    def needs(self) -> CodecNeeds:
        """See ``Codec.needs``: keys are grouped along tokens before the window."""
        return CodecNeeds(token_align=self.group)

    def without_tail(self) -> KIVI:
        """See ``Codec.without_tail``."""
        return dataclasses.replace(self, window=0)

    def draft_layout(self, part_shape: PartShape) -> Layout:
        """See ``Codec.draft_layout``; fixed by the shape.

        Raises:
            CompressionError: Groups do not divide ``value_dim``.
        """
        if part_shape.value_dim % self.group:
            raise CompressionError(
                f"kivi: group {self.group} does not divide the value dim "
                f"{part_shape.value_dim}"
            )
        heads, byte, kind = part_shape.heads, torch.uint8, part_shape.dtype
        keys, values = self._sealed(part_shape.tokens)
        key_groups = (heads, keys // self.group, part_shape.key_dim)
        value_groups = (heads, values, part_shape.value_dim // self.group)
        key_bytes = packed_bytes(part_shape.key_dim, self.bits)
        value_bytes = packed_bytes(part_shape.value_dim, self.bits)
        return {
            "key_codes": (byte, (heads, keys, key_bytes)),
            "key_step": (kind, key_groups),
            "key_minimum": (kind, key_groups),
            "key_tail": (kind, (heads, part_shape.tokens - keys, part_shape.key_dim)),
            "value_codes": (byte, (heads, values, value_bytes)),
            "value_step": (kind, value_groups),
            "value_minimum": (kind, value_groups),
            "value_tail": (
                kind,
                (heads, part_shape.tokens - values, part_shape.value_dim),
            ),
        }

    def extend(
        self, draft: PartSpec, keys: torch.Tensor, values: torch.Tensor
    ) -> PartSpec:
        """Append decoded tokens; bit-identical to encoding all tokens at once.

        Keys leave the exact tail ``window`` tokens at a time, values one by one.

        Args:
            draft: Draft KV of the tokens so far.
            keys: [H, t, D] of the new tokens, dtype and device of the part.
            values: [H, t, Dv].

        Returns:
            The draft KV of all tokens; its positions are unknown (None).

        Raises:
            CompressionError: The part or the shapes are malformed.
        """
        self._check("draft", draft, self.draft_layout(draft.part_shape))
        added = check_kv(keys, values)
        part_shape = dataclasses.replace(draft.part_shape, tokens=added.tokens)
        if added != part_shape:
            raise CompressionError(f"kivi: {added} does not extend {draft.part_shape}")
        part_shape = dataclasses.replace(
            part_shape, tokens=part_shape.tokens + draft.part_shape.tokens
        )
        old = draft.tensors
        new = self._seal(
            torch.cat([old["key_tail"], keys], dim=1),
            torch.cat([old["value_tail"], values], dim=1),
        )
        tensors = {
            field: new[field]
            if field.endswith("_tail")
            else torch.cat([old[field], new[field]], dim=1)
            for field in new
        }
        return PartSpec(self.identity, part_shape, draft.layer, None, tensors)

    def _sealed(self, tokens: int) -> tuple[int, int]:
        """Return how many keys and values of ``tokens`` are quantized.

        Raises:
            CompressionError: ``window`` is 0 and ``tokens`` do not fill whole groups.
        """
        if not self.window:
            if tokens % self.group:
                raise CompressionError(
                    f"kivi: window 0 needs whole groups of {self.group} tokens, "
                    f"got {tokens} tokens"
                )
            return tokens, tokens
        return tokens - tokens % self.window, max(0, tokens - self.window)

    def _encode_draft(self, source: Source) -> tuple[PartShape, Tensors]:
        self.draft_layout(source.part_shape)
        return source.part_shape, self._seal(source.keys, source.values)

    def _seal(self, keys: torch.Tensor, values: torch.Tensor) -> Tensors:
        """Quantize tokens before the window; keys and values may differ in number."""
        heads, _, key_dim = keys.shape
        sealed_keys, _ = self._sealed(keys.shape[1])
        _, sealed_values = self._sealed(values.shape[1])
        shape = (heads, sealed_keys // self.group, self.group, key_dim)
        codes, key_step, key_minimum = _quantize(
            keys[:, :sealed_keys].reshape(shape), self.bits, 2
        )
        key_codes = codes.view(heads, sealed_keys, key_dim)
        shape = (heads, sealed_values, values.shape[2] // self.group, self.group)
        codes, value_step, value_minimum = _quantize(
            values[:, :sealed_values].reshape(shape), self.bits, 3
        )
        value_codes = codes.view(heads, sealed_values, values.shape[2])
        return {
            "key_codes": pack(key_codes, self.bits),
            "key_step": key_step,
            "key_minimum": key_minimum,
            "key_tail": keys[:, sealed_keys:].clone(),
            "value_codes": pack(value_codes, self.bits),
            "value_step": value_step,
            "value_minimum": value_minimum,
            "value_tail": values[:, sealed_values:].clone(),
        }

    def _decode(self, draft: PartSpec) -> tuple[torch.Tensor, torch.Tensor]:
        part_shape, tensors = draft.part_shape, draft.tensors
        heads = part_shape.heads
        sealed_keys, sealed_values = self._sealed(part_shape.tokens)
        codes = unpack(tensors["key_codes"], self.bits, part_shape.key_dim)
        shape = (heads, sealed_keys // self.group, self.group, part_shape.key_dim)
        keys = _dequantize(
            codes.view(shape), tensors["key_step"], tensors["key_minimum"], 2
        )
        codes = unpack(tensors["value_codes"], self.bits, part_shape.value_dim)
        shape = (heads, sealed_values, part_shape.value_dim // self.group, self.group)
        values = _dequantize(
            codes.view(shape), tensors["value_step"], tensors["value_minimum"], 3
        )
        keys = keys.view(heads, sealed_keys, part_shape.key_dim)
        values = values.view(heads, sealed_values, part_shape.value_dim)
        return (
            torch.cat([keys, tensors["key_tail"]], dim=1),
            torch.cat([values, tensors["value_tail"]], dim=1),
        )


def _quantize(
    groups: torch.Tensor, bits: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize groups that run along ``dim``.

    Args:
        groups: Any shape and float dtype.
        bits: Width of a code.
        dim: Dimension along which a group runs.

    Returns:
        Codes in the shape of ``groups``, uint8; step and minimum without ``dim``, in
        its dtype. Codes of a group with NaN or infinities are undefined.
    """
    minimum = groups.amin(dim)
    top = (1 << bits) - 1
    spread = groups.amax(dim).to(torch.float32) - minimum.to(torch.float32)
    step = (spread / top).to(groups.dtype)
    above = groups.to(torch.float32) - minimum.to(torch.float32).unsqueeze(dim)
    codes = (above / step.to(torch.float32).unsqueeze(dim)).clamp(0, top).round()
    return codes.nan_to_num(0).to(torch.uint8), step, minimum


def _dequantize(
    codes: torch.Tensor, step: torch.Tensor, minimum: torch.Tensor, dim: int
) -> torch.Tensor:
    """Dequantize codes, in the dtype of ``step``."""
    scaled = codes.to(torch.float32) * step.to(torch.float32).unsqueeze(dim)
    return (scaled + minimum.to(torch.float32).unsqueeze(dim)).to(step.dtype)
