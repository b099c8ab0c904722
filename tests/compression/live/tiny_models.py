"""Random models of four layers, and a tokenizer of bytes on disk.

Nothing imports transformers before a test asks for a model: it takes seconds.
"""

import torch

NAMES = ("llama", "llama-yarn", "qwen3")

SHAPE = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
}
"""Hidden sizes differ below: Qwen3's is not query heads times head dim."""

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}
"""Other frequencies, and an amplitude on sine and cosine."""

TEMPLATE = (
    "{% for message in messages %}<user> {{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} </user>\n<model> {% endif %}"
)
"""What stands before a context is 7 tokens, more than KVzip's 4 sinks."""

BEFORE, AFTER = "<user> ", " </user>\n<model> "


def write_tokenizer(folder, template=None):
    """Save a tokenizer whose tokens are single bytes.

    Args:
        folder: Exists.
        template: Chat template; None: there is none.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def build(name, folder, seed=0):
    """Return a random model in float32; ``folder`` is where its tokenizer lies.

    Attention of freshly drawn models is nearly flat, and ranks of flat scores are
    noise, so it is made peakier.
    """
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    torch.manual_seed(seed)
    if name == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(hidden_size=96, **SHAPE))
        peaky = [layer.self_attn.q_norm for layer in model.model.layers]
        factor = 2.0
    else:
        rope = {"rope_parameters": YARN} if name == "llama-yarn" else {}
        model = LlamaForCausalLM(LlamaConfig(hidden_size=256, **SHAPE, **rope))
        layers = [layer.self_attn for layer in model.model.layers]
        peaky = [part for layer in layers for part in (layer.q_proj, layer.k_proj)]
        factor = 4.0
    with torch.no_grad():
        for part in peaky:
            part.weight.mul_(factor)
    model.config.name_or_path = str(folder)
    return model.eval()
