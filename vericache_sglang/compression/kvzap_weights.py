"""KVzap checkpoints in the published layout: read, checked and written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch.nn import functional

from vericache_sglang.compression.placed import placed
from vericache_sglang.errors import CompressionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CONFIG, TENSORS = "config.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class AffineLayer:
    """One linear map, ``x @ weight.T + bias``.

    Attributes:
        weight: [out, in].
        bias: [out], of the same dtype.
    """

    weight: torch.Tensor
    bias: torch.Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> AffineLayer:
        """Convert to a device and dtype; copies only if one of them changes."""
        return AffineLayer(
            placed(self.weight.to(dtype), device), placed(self.bias.to(dtype), device)
        )


@dataclass(frozen=True, slots=True)
class Scorer:
    """The regressor of one layer: linear, or two maps with an exact GELU between.

    Attributes:
        final: [H, d], or [H, w] behind ``inner``; float32.
        inner: [w, d], any float dtype; None: linear.
    """

    final: AffineLayer
    inner: AffineLayer | None = None

    def heads(self, own: slice) -> Scorer:
        """Return the regressor of some of the KV heads; views."""
        return Scorer(
            AffineLayer(self.final.weight[own], self.final.bias[own]), self.inner
        )

    @property
    def width(self) -> int | None:
        """w, hidden width of the MLP; None: linear."""
        return None if self.inner is None else self.inner.weight.shape[0]

    def score(self, inputs: torch.Tensor) -> torch.Tensor:
        """Score tokens independently of each other.

        The final map is in float32: bfloat16 scores would take few values, and ties
        keep the earlier token. The inner map is in the dtype of its weight.

        Args:
            inputs: [n, d], any float dtype.

        Returns:
            [H, n] float32.
        """
        if self.inner is not None:
            inputs = functional.linear(
                inputs.to(self.inner.weight.dtype), self.inner.weight, self.inner.bias
            )
            inputs = functional.gelu(inputs)
        columns = inputs.to(torch.float32).t()
        return torch.addmm(self.final.bias[:, None], self.final.weight, columns)

    def named(self) -> dict[str, torch.Tensor]:
        """Return the tensors by published name, without the prefix ``layers.{l}.``."""
        if self.inner is None:
            return {"weight": self.final.weight, "bias": self.final.bias}
        return {
            "0.weight": self.inner.weight,
            "0.bias": self.inner.bias,
            "2.weight": self.final.weight,
            "2.bias": self.final.bias,
        }


@dataclass(frozen=True, slots=True)
class KVzapWeights:
    """A checkpoint: one regressor per layer, all of the same sizes.

    Attributes:
        path: Folder it was read from, for messages.
        input_dim: d, elements of an attention input.
        output_dim: H, KV heads.
        layers: By layer index, float32 on the CPU.
    """

    path: Path
    input_dim: int
    output_dim: int
    layers: tuple[Scorer, ...]


def read_weights(folder: Path | str) -> KVzapWeights:
    """Read a checkpoint of kvpress (``KVzapModel.save_pretrained``) or our own.

    Args:
        folder: Holds ``config.json`` (``input_dim``, ``output_dim``, ``n_modules`` and
            ``hidden_dim``, null or absent for a linear one) and ``model.safetensors``
            (``layers.{l}.weight``; of an MLP ``layers.{l}.0.weight`` and ``.2.``; each
            with its ``bias``), of any float type.

    Raises:
        CompressionError: A file is missing, truncated or of another kind, or a field
            is missing, of another shape, or not finite; the message names file and
            field.
    """
    folder = Path(folder)
    sizes = _read_sizes(folder / CONFIG)
    path = folder / TENSORS
    try:
        tensors = load(_read(path))
    except SafetensorError as error:
        raise CompressionError(
            f"{path}: truncated or not a safetensors file: {error}"
        ) from error
    layers = tuple(
        _layer(path, tensors, index, sizes) for index in range(sizes["n_modules"])
    )
    known = {
        f"layers.{index}.{name}"
        for index, layer in enumerate(layers)
        for name in layer.named()
    }
    if extra := sorted(set(tensors) - known):
        raise CompressionError(
            f"{path}: field {extra[0]!r} is not one of the {sizes['n_modules']} layers "
            f"that {CONFIG} describes"
        )
    return KVzapWeights(folder, sizes["input_dim"], sizes["output_dim"], layers)


def write_weights(
    folder: Path | str, layers: Sequence[Scorer], notes: Mapping[str, object]
) -> KVzapWeights:
    """Write a checkpoint that kvpress' ``KVzapModel`` also loads, and read it back.

    Args:
        folder: Created if missing; files of the same names are replaced.
        layers: Regressors, at least one, all of the same sizes.
        notes: Further entries of ``config.json``, such as training parameters.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    first = layers[0]
    source = first.final if first.inner is None else first.inner
    config = {
        **notes,
        "architectures": ["KVzapModel"],
        "model_type": "kvzap",
        "input_dim": source.weight.shape[1],
        "output_dim": first.final.weight.shape[0],
        "n_modules": len(layers),
        "hidden_dim": first.width,
        "dtype": "float32",
    }
    tensors = {
        f"layers.{index}.{name}": tensor.to("cpu", torch.float32).contiguous()
        for index, layer in enumerate(layers)
        for name, tensor in layer.named().items()
    }
    partial = folder / f"{TENSORS}.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / TENSORS)
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
    return read_weights(folder)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CompressionError(f"{path}: cannot be read: {error.strerror}") from error


def _read_sizes(path: Path) -> dict[str, int]:
    """Return the sizes in a config; without ``hidden_dim`` for a linear regressor."""
    try:
        config = json.loads(_read(path))
    except ValueError as error:
        raise CompressionError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CompressionError(f"{path}: must be a JSON object, is {config!r:.60}")
    fields = ["input_dim", "output_dim", "n_modules"]
    if config.get("hidden_dim") is not None:
        fields.append("hidden_dim")
    for field in fields:
        value = config.get(field)
        if type(value) is not int or value < 1:  # True is an int, too
            shown = repr(value) if field in config else "missing"
            raise CompressionError(
                f"{path}: field {field!r} must be a whole number >= 1, is {shown}"
            )
    return {field: config[field] for field in fields}


def _layer(
    path: Path, tensors: Mapping[str, torch.Tensor], index: int, sizes: dict[str, int]
) -> Scorer:
    """Read the regressor of one layer from a file."""
    source, heads, width = sizes["input_dim"], sizes["output_dim"], "hidden_dim"
    name = f"layers.{index}"
    if width not in sizes:
        return Scorer(_affine(path, tensors, name, (heads, source)))
    return Scorer(
        _affine(path, tensors, f"{name}.2", (heads, sizes[width])),
        _affine(path, tensors, f"{name}.0", (sizes[width], source)),
    )


def _affine(
    path: Path, tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, int]
) -> AffineLayer:
    """Read one linear map from a file, as float32."""
    found = {}
    for part, wanted in (("weight", shape), ("bias", shape[:1])):
        where = f"{path}: field '{name}.{part}'"
        tensor = tensors.get(f"{name}.{part}")
        if tensor is None:
            raise CompressionError(
                f"{where} is missing; the file has {', '.join(sorted(tensors)) or '-'}"
            )
        if not tensor.is_floating_point() or tensor.shape != wanted:
            raise CompressionError(
                f"{where} must be floats {list(wanted)}, is {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
        if not tensor.isfinite().all():
            raise CompressionError(f"{where} holds NaN or infinities")
        found[part] = tensor.to(torch.float32)
    return AffineLayer(found["weight"], found["bias"])
