"""The demo model with a vocabulary as large as the kits take for granted.

The kits send token ids up to 31,999; the demo model knows 586 and SGLang refuses the
rest. The copy has an embedding row for each: those beyond are the first 586 again and
again, shorter each time, so they mean about the same as an input, and as an output they
lose to the row they were copied from.
"""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

VOCABULARY = 32000
EMBEDDING = "model.embed_tokens.weight"


def widen(source, target):
    """Copy the model in ``source`` to ``target``, widened; returns ``target``."""
    shutil.copytree(source, target)
    weights = load_file(source / "model.safetensors")
    narrow = weights[EMBEDDING]
    ids = torch.arange(VOCABULARY)
    copies = ids // len(narrow)
    length = torch.where(copies == 0, 1.0, 0.5 - copies / 400)
    weights[EMBEDDING] = (narrow[ids % len(narrow)] * length[:, None]).contiguous()
    (target / "model.safetensors").unlink()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["vocab_size"] = VOCABULARY
    (target / "config.json").write_text(json.dumps(config))
    return target
