"""Fit KVzap's regressors to a model, and write them in the published layout.

    python scripts/train_kvzap.py configs/demo-model --kind linear \
        --out configs/demo-model/kvzap-linear
    python scripts/train_kvzap.py configs/demo-model --kind mlp --width 64 \
        --out configs/demo-model/kvzap-mlp
    python scripts/train_kvzap.py MODEL --kind linear --texts FILE --out FOLDER

MODEL is a folder of a Llama-like Hugging Face checkpoint. Without ``--texts`` the
texts are documents of the demo model's generator, in the system turn where a served
one has them. Memory: the examples take texts * tokens * layers * hidden size * 4
bytes, and an attention query heads * (2,500 tokens)^2 * 8. Prints a table in Markdown
of how well held-out texts are guessed; the same seed gives the same weights.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

sys.path.insert(0, str(Path(__file__).parent))

from kvzap import fit, targets, texts
from vericache_sglang.compression.kvzap_weights import write_weights
from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvzap.targets import Layer
    from vericache_sglang.compression.kvzap_weights import Scorer


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--kind", choices=("linear", "mlp"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder, made")
    parser.add_argument("--texts", type=Path, help="a text file to train on")
    parser.add_argument("--count", type=int, default=70, help="most texts that are run")
    parser.add_argument("--held-out", type=int, default=10, help="of them, to measure")
    parser.add_argument("--tokens", type=int, default=500, help="examples of a text")
    parser.add_argument("--width", type=int, default=512, help="hidden size of an MLP")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    if not 1 <= given.held_out < given.count:
        parser.error("--held-out must be at least 1 and below --count")
    return given


def read(given: argparse.Namespace) -> list[list[Layer]]:
    """Run the texts through the model; per text, its layers."""
    define_missing_ops()  # before transformers looks at torchvision
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(
        given.model, dtype=torch.float32, attn_implementation="eager"
    )
    role: targets.Role = "user"
    if given.texts is None:
        role, drawn = "system", texts.documents(tokenizer, given.count, given.seed)
    else:
        drawn = iter(texts.pieces(tokenizer, given.texts)[: given.count])
    found, begun = [], time.time()
    for number, text in enumerate(drawn, start=1):
        found.append(targets.collect(model, targets.repeat(tokenizer, text, role)))
        if number % 10 == 0:
            print(f"{number} texts: {time.time() - begun:.0f} s", file=sys.stderr)
    return found


def train(found: list[list[Layer]], given: argparse.Namespace) -> list[Scorer]:
    """Fit the regressors of all layers to tokens drawn from ``found``."""
    generator = torch.Generator().manual_seed(given.seed)
    drawn = [fit.sample(layers, given.tokens, generator) for layers in found]
    inputs, wanted = (
        torch.stack(
            [
                torch.cat([text[layer][part] for text in drawn])
                for layer in range(len(found[0]))
            ]
        )
        for part in (0, 1)
    )
    if given.kind == "linear":
        return fit.fit_linear(inputs, wanted)
    return fit.fit_mlp(inputs, wanted, given.width, fit.Schedule(), generator)


def main(argv: Sequence[str]) -> None:
    """Train, write, and print how well held-out texts are guessed."""
    given = arguments(argv)
    torch.set_num_threads(1)  # sums over more threads are not the same every time
    found = read(given)
    held_out = min(given.held_out, len(found) - 1)
    scorers = train(found[held_out:], given)
    measured = fit.quality(scorers, found[:held_out])
    notes = {
        "base_model": given.model.resolve().name,
        "kind": given.kind,
        "texts": "generator" if given.texts is None else given.texts.name,
        "trained_on": len(found) - held_out,
        "held_out": held_out,
        "tokens": given.tokens,
        "seed": given.seed,
        "quality": [
            {name: round(value, 4) for name, value in asdict(layer).items()}
            for layer in measured
        ],
    }
    write_weights(given.out, scorers, {"training": notes})
    print("| layer | R2 | Spearman |\n|---|---|---|")
    for index, layer in enumerate(measured):
        print(f"| {index} | {layer.r2:.3f} | {layer.spearman:.3f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
