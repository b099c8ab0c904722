"""Hugging Face checkpoints: write a net as ``LlamaForCausalLM``, read one back."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file

from demo_model.net import Net, NetConfig

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL_IDS = {"bos_token_id": 1, "eos_token_id": 6, "pad_token_id": 0}


def export(net: Net, folder: Path, max_position_embeddings: int) -> None:
    """Write float32 weights, config and generation config into ``folder``.

    Args:
        net: Any ``Net``; not modified.
        folder: Made where missing; files of the same names are replaced.
        max_position_embeddings: What the config says, in tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().float().contiguous()
        for name, value in net.state_dict().items()
    }
    partial = folder / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    sizes = asdict(net.config)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes["rope_theta"]},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        **SPECIAL_IDS,
        "torch_dtype": "float32",
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {**SPECIAL_IDS, "do_sample": False})


def load(folder: Path) -> Net:
    """Read a checkpoint that ``export`` wrote.

    Raises:
        ValueError: The config is of another kind of model.
    """
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama" or not config["tie_word_embeddings"]:
        raise ValueError(f"{folder} holds no Llama with tied embeddings")
    net = Net(NetConfig(**{f.name: config[f.name] for f in fields(NetConfig)}))
    net.load_state_dict(load_file(folder / "model.safetensors"))
    return net.eval()


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=1) + "\n")
