"""Folders of models without weights, for ``--load-format dummy``."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

from gpu.part import ROOT

if TYPE_CHECKING:
    from pathlib import Path

TOKENIZER = ROOT / "configs" / "demo-model"
"""Its tokenizer is carried with each: what ids mean is of no matter."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

CONTEXT = 40960
"""Tokens a dummy model is said to serve."""

TINY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""A model that boots in no time."""

FAMILIES = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 500000.0,
        "mlp_bias": False,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rope_theta": 1000000.0,
    },
}
"""What a config.json says beside the shapes, by the first part of a model's name."""


def dummy_model(folder: Path, name: str) -> Path:
    """Write config and tokenizer of a model; return its folder.

    Args:
        folder: Gets a folder of the model's name.
        name: Of ``vericache_sglang.planning.models.CATALOGUE``, or "qwen3-tiny".

    Raises:
        KeyError: It is neither, or of another family.
    """
    from vericache_sglang.planning.models import CATALOGUE

    shape = TINY if name == "qwen3-tiny" else CATALOGUE[name]
    fields: dict[str, Any] = {
        **FAMILIES[name.partition("-")[0]],
        **shape,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 6,
        "pad_token_id": 0,
    }
    own = folder / name
    own.mkdir(parents=True, exist_ok=True)
    (own / "config.json").write_text(json.dumps(fields, indent=1), encoding="utf-8")
    for file in TOKENIZER_FILES:
        shutil.copy(TOKENIZER / file, own / file)
    return own
