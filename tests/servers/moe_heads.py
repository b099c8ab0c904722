"""Random checkpoints of MoE models that bring a prediction head, by SGLang's names.

Weights are small beside the embeddings, so the next token mostly follows from the last
one, and a head that passes on the embedding of the token it reads is right far more
often than by chance. One that is loaded or fed wrongly is not.
"""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

MODEL = Path(__file__).parents[2] / "configs" / "demo-model"
SIZE, HEADS, LAYERS, EXPERTS = 64, 4, 2, 4
WIDE, NARROW = 96, 32
"""Intermediate sizes of a dense layer and of an expert."""

SHARED = {
    "vocab_size": 586,
    "hidden_size": SIZE,
    "intermediate_size": WIDE,
    "moe_intermediate_size": NARROW,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "head_dim": SIZE // HEADS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 1,
    "eos_token_id": 6,
    "pad_token_id": 0,
    "dtype": "float32",
}


class Family(NamedTuple):
    """What one architecture has that others have not.

    Attributes:
        fields: Of its config.json.
        dense: Layers without experts, which are the first ones.
        more: Shapes of a sparse layer's weights besides attention and experts.
        head: Prefix of the head's layer.
        sparse: Whether that layer has experts.
        mixes: Weight that reads the embedding and, behind it, the hidden state.
        norms: Further weights of the head.
    """

    fields: dict
    dense: int
    more: dict
    head: str
    sparse: bool
    mixes: str
    norms: tuple


def mlp(prefix, size):
    """Return the shapes of an MLP's weights by name."""
    inner = {f"{prefix}.{name}_proj.weight": (size, SIZE) for name in ("gate", "up")}
    return {**inner, f"{prefix}.down_proj.weight": (SIZE, size)}


FAMILIES = {
    "GLM": Family(
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": False,
            "attention_bias": False,
        },
        dense=1,
        more={
            "mlp.gate.weight": (EXPERTS, SIZE),
            "mlp.gate.e_score_correction_bias": (EXPERTS,),
            **mlp("mlp.shared_experts", NARROW),
        },
        head=f"model.layers.{LAYERS}.",
        sparse=True,
        mixes=f"model.layers.{LAYERS}.eh_proj.weight",
        norms=tuple(
            f"model.layers.{LAYERS}.{name}.weight"
            for name in ("enorm", "hnorm", "shared_head.norm")
        ),
    ),
    "ERNIE": Family(
        {
            "architectures": ["Ernie4_5_MoeForCausalLM"],
            "model_type": "ernie4_5_moe",
            "moe_num_experts": EXPERTS,
            "moe_num_shared_experts": 1,
            "moe_k": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": LAYERS - 1,
            "moe_layer_interval": 1,
            "use_bias": False,
        },
        dense=1,
        more={
            "mlp.gate.weight": (EXPERTS, SIZE),
            "mlp.moe_statics.e_score_correction_bias": (1, EXPERTS),
            **mlp("mlp.shared_experts", NARROW),
        },
        head="model.mtp_block.0.",
        sparse=False,
        mixes="model.mtp_linear_proj.0.weight",
        norms=("model.mtp_emb_norm.0.weight", "model.mtp_hidden_norm.0.weight"),
    ),
    "Qwen3-MoE": Family(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "attention_bias": False,
        },
        dense=0,
        more={
            "mlp.gate.weight": (EXPERTS, SIZE),
            "self_attn.q_norm.weight": (SIZE // HEADS,),
            "self_attn.k_norm.weight": (SIZE // HEADS,),
        },
        head="mtp.layers.0.",
        sparse=True,
        mixes="mtp.fc.weight",
        norms=(
            *(f"mtp.pre_fc_norm_{name}.weight" for name in ("embedding", "hidden")),
            "mtp.norm.weight",
        ),
    ),
}


def layer(prefix, family, sparse):
    """Return the shapes of a layer's weights by name."""
    names = {
        "input_layernorm.weight": (SIZE,),
        "post_attention_layernorm.weight": (SIZE,),
        "self_attn.q_proj.weight": (SIZE, SIZE),
        "self_attn.k_proj.weight": (SIZE // 2, SIZE),
        "self_attn.v_proj.weight": (SIZE // 2, SIZE),
        "self_attn.o_proj.weight": (SIZE, SIZE),
    }
    if sparse:
        for i in range(EXPERTS):
            names |= mlp(f"mlp.experts.{i}", NARROW)
        names |= family.more
    else:
        names |= mlp("mlp", WIDE)
    return {prefix + name: shape for name, shape in names.items()}


def drawn(name, shape, mixes):
    """Return a weight."""
    if "norm" in name:
        return torch.empty(shape).uniform_(0.8, 1.2)
    if "embed" in name:
        return torch.randn(shape)
    weight = torch.randn(shape) * 0.3 / shape[-1] ** 0.5
    if name == mixes:
        weight[:, :SIZE] += torch.eye(SIZE)
    return weight


def write_checkpoint(folder, family):
    """Write a checkpoint of a family with random weights."""
    row = FAMILIES[family]
    words = SHARED["vocab_size"], SIZE
    shapes = {"model.embed_tokens.weight": words, "lm_head.weight": words}
    shapes |= dict.fromkeys(("model.norm.weight", *row.norms), (SIZE,))
    for i in range(LAYERS):
        shapes |= layer(f"model.layers.{i}.", row, i >= row.dense)
    shapes |= layer(row.head, row, row.sparse) | {row.mixes: (SIZE, 2 * SIZE)}
    torch.manual_seed(6)
    weights = {name: drawn(name, shape, row.mixes) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**SHARED, **row.fields}))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, folder / name)
