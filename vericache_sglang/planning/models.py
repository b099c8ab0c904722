"""Sizes of a model's weights, KV and activations, from its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from vericache_sglang.errors import ConfigError, UnsupportedError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"

_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Shape of a decoder with grouped-query attention, for cost and memory models.

    Attributes:
        name: Name as given by the user.
        layers: Decoder layers.
        heads: Query heads per layer.
        kv_heads: KV heads per layer.
        head_dim: Elements per head.
        hidden: Elements of a hidden state.
        mlp: Intermediate size of the MLP, summed over the experts of a token.
        vocab: Entries of the vocabulary.
        positions: Longest context of the model, in tokens.
        params: Parameters, estimated from the shapes, with norms.
        weight_bytes: Bytes of the weights on the device.
        element_bytes: Bytes of one KV element.
        states: Hidden states of a token that it reads, if it is a head.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    mlp: int
    vocab: int
    positions: int
    params: int
    weight_bytes: int
    element_bytes: int = 2
    states: int = 3

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.element_bytes


def _catalogued(
    hidden: int, intermediate: int, layers: int, heads: int, vocab: int, positions: int
) -> Mapping[str, object]:
    # Every catalogued model has 8 KV heads of 128 and untied embeddings.
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


CATALOGUE: Mapping[str, Mapping[str, object]] = {
    "llama-3.1-8b": _catalogued(4096, 14336, 32, 32, 128256, 131072),
    "llama-3.1-70b": _catalogued(8192, 28672, 80, 64, 128256, 131072),
    "mistral-small-24b": _catalogued(5120, 32768, 40, 32, 131072, 32768),
    "qwen3-8b": _catalogued(4096, 12288, 36, 32, 151936, 40960),
    "qwen3-14b": _catalogued(5120, 17408, 40, 40, 151936, 40960),
    "qwen3-32b": _catalogued(5120, 25600, 64, 64, 151936, 40960),
}
"""Shapes from each model's published config.json."""


def find_model(name: str, flag: str = "--model") -> ModelShape:
    """Return the model of a folder with a config.json, or of the catalogue.

    Args:
        flag: Given by the user, for the error message.

    Raises:
        ConfigError: ``name`` is neither, or the config.json lacks a field.
        UnsupportedError: See ``shape_of``.
    """
    folder = Path(name)
    if (folder / CONFIG).is_file():
        return read_model(folder)
    if name.lower() in CATALOGUE:
        return shape_of(CATALOGUE[name.lower()], name.lower())
    raise ConfigError(
        f"{flag} {name!r} is neither a folder with a {CONFIG} nor a known name; "
        f"known: {', '.join(CATALOGUE)}"
    )


def read_model(folder: Path) -> ModelShape:
    """Read a Hugging Face model folder; weights are sized by its files if present.

    Raises:
        ConfigError: config.json is not a JSON object, or lacks a field.
        UnsupportedError: See ``shape_of``.
    """
    fields = _json_object(folder / CONFIG)
    # Multimodal checkpoints nest the decoder's fields in "text_config".
    inner = fields.get("text_config")
    if isinstance(inner, Mapping):
        fields = {**fields, **inner}
    return shape_of(fields, str(folder), stored_bytes(folder))


def shape_of(
    fields: Mapping[str, object], name: str, weight_bytes: int | None = None
) -> ModelShape:
    """Build the shape from the fields of a config.json.

    Args:
        fields: Fields by their Hugging Face names.
        name: Name of the model, which begins error messages.
        weight_bytes: Size of the stored weights; None estimates it from the shapes.

    Raises:
        ConfigError: A needed field is missing or not a whole number above 0.
            ``max_position_embeddings`` and ``intermediate_size`` may be missing.
        UnsupportedError: The model has latent attention (MLA), whose KV has another
            shape, or is a mixture of experts without stored weights.
    """
    if fields.get("kv_lora_rank"):
        raise UnsupportedError(f"{name}: latent attention (kv_lora_rank) is not served")
    layers = _whole(fields, "num_hidden_layers", name)
    heads = _whole(fields, "num_attention_heads", name)
    hidden = _whole(fields, "hidden_size", name)
    kv_heads = _whole(fields, "num_key_value_heads", name, heads)
    head_dim = _whole(fields, "head_dim", name, hidden // heads)
    kind = str(fields.get("torch_dtype") or fields.get("dtype") or "bfloat16")
    if kind not in _ELEMENT_BYTES:
        raise ConfigError(f"{name}: torch_dtype {kind!r}, known: float32, bfloat16 ...")
    element_bytes = _ELEMENT_BYTES[kind]
    if weight_bytes is not None:
        params = weight_bytes // element_bytes
    else:
        params = _estimated_params(fields, name, heads * head_dim, kv_heads * head_dim)
    return ModelShape(
        name=name,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        mlp=_mlp_elements(fields, name, hidden),
        vocab=_whole(fields, "vocab_size", name),
        positions=_whole(fields, "max_position_embeddings", name, 2048),
        params=params,
        weight_bytes=weight_bytes or params * element_bytes,
        element_bytes=element_bytes,
        states=aux_states(fields),
    )


def predictor_of(model: ModelShape) -> ModelShape:
    """Return the shape of a model's prediction head: one of its layers."""
    size = model.weight_bytes // model.layers
    return replace(model, layers=1, weight_bytes=size, states=1)


def aux_states(fields: Mapping[str, object]) -> int:
    """Return how many hidden states of a token an EAGLE3 head with a config reads."""
    count = fields.get("num_aux_hidden_states")
    if isinstance(count, int) and count > 0:
        return count
    eagle = fields.get("eagle_config")
    layers = "eagle_aux_hidden_state_layer_ids"
    listed = eagle.get(layers) if isinstance(eagle, Mapping) else None
    return len(listed) if isinstance(listed, list) and listed else 3


def _mlp_elements(fields: Mapping[str, object], name: str, hidden: int) -> int:
    dense = _whole(fields, "intermediate_size", name, 4 * hidden)
    expert = _whole(fields, "moe_intermediate_size", name, dense)
    return max(dense, _whole(fields, "num_experts_per_tok", name, 1) * expert)


def _estimated_params(
    fields: Mapping[str, object], name: str, query_dim: int, kv_dim: int
) -> int:
    if fields.get("num_experts") or fields.get("num_local_experts"):
        raise UnsupportedError(
            f"{name}: a mixture of experts is sized by its files; {INDEX} is missing"
        )
    hidden = _whole(fields, "hidden_size", name)
    attention = 2 * hidden * query_dim + 2 * hidden * kv_dim
    mlp = 3 * hidden * _whole(fields, "intermediate_size", name)
    layers = _whole(fields, "num_hidden_layers", name)
    tables = 1 if fields.get("tie_word_embeddings") else 2
    embeddings = tables * hidden * _whole(fields, "vocab_size", name)
    return layers * (attention + mlp + 2 * hidden) + embeddings + hidden


def stored_bytes(folder: Path) -> int | None:
    """Return the bytes of safetensors weights in a folder; None if there are none."""
    if (folder / INDEX).is_file():
        metadata = _json_object(folder / INDEX).get("metadata")
        if isinstance(metadata, Mapping) and isinstance(
            metadata.get("total_size"), (int, float)
        ):
            return int(metadata["total_size"])
    # The headers of safetensors files are negligible. Mistral's repositories contain
    # every weight a second time, in "consolidated" files.
    files = [file for file in folder.glob("*.safetensors") if "consol" not in file.name]
    return sum(file.stat().st_size for file in files) or None


def stored_names(folder: Path) -> frozenset[str]:
    """Return the names of the safetensors weights in a folder."""
    if (folder / INDEX).is_file():
        listed = _json_object(folder / INDEX).get("weight_map")
        return frozenset(listed) if isinstance(listed, Mapping) else frozenset()
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            names |= json.loads(file.read(size)).keys()
    return frozenset(names)


def _json_object(path: Path) -> dict[str, object]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model: {path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"--model: {path} is not a JSON object")
    return fields


def _whole(
    fields: Mapping[str, object], field: str, name: str, default: int | None = None
) -> int:
    value = fields.get(field)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"--model {name}: {CONFIG} needs {field}, a whole number > 0, got {value!r}"
        )
    return value
