"""Bits, transfer fraction and draft error of every codec on the demo model's KV.

    python scripts/codec_table.py                 # a document of 4,000 tokens
    python scripts/codec_table.py --context 1000

One forward in float32 gives the KV, which is rounded to bfloat16; KVQuant and RotateKV
are calibrated on another document. Every residual is joined and compared bit for bit.
Prints a table in Markdown. A draft's error says little about whether its tokens are
accepted; that is measured by serving.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

sys.path.insert(0, str(Path(__file__).parent))

from demo_model import checkpoint, records, tokenizer
from demo_model.net import frequencies
from vericache_sglang.compression.codecs import kvquant_tables, rotatekv_tables
from vericache_sglang.compression.codecs.catalog import create_codec
from vericache_sglang.compression.codecs.rope import Rope
from vericache_sglang.compression.codecs.rotatekv import massive_slots
from vericache_sglang.compression.codecs.rows import as_rows

if TYPE_CHECKING:
    from vericache_sglang.compression.codecs.base import Codec, Part

ROOT = Path(__file__).parents[1]
SINKS = 4
PLANES = [(4, 3), (4, 2), (4, 1), (4, 0), (3, 4), (3, 2), (3, 1), (3, 0), (2, 2)]


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's cache behind RoPE, and what entered the layer.

    Attributes:
        keys: [H, T, D] float32.
        values: [H, T, D] float32.
        hidden: [T, d] float32.
    """

    keys: torch.Tensor
    values: torch.Tensor
    hidden: torch.Tensor


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "configs/demo-model-long")
    parser.add_argument("--context", type=int, default=4000, help="prompt tokens")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


class DemoModel:
    """The demo model in plain torch, float32.

    Args:
        path: Its folder.
    """

    def __init__(self, path: Path) -> None:
        self._net = checkpoint.load(path)
        self._tokenizer = tokenizer.load(path)
        self.rope = Rope(frequencies(self._net.config))

    def _encode(self, text: str) -> list[int]:
        return tokenizer.encode(self._tokenizer, text)

    @torch.inference_mode()
    def read(self, context: int, seed: int) -> list[LayerKV]:
        """Return the KV of a drawn document of about ``context`` tokens."""
        text = records.prompt_of_length(
            random.Random(seed), context, lambda t: len(self._encode(t)), calls=1
        ).text
        ids = torch.tensor([self._encode(text)])
        _, outputs, past = self._net.hidden(ids)
        inputs = [self._net.model.embed_tokens(ids), *outputs[:-1]]
        return [
            LayerKV(kept[0][0], kept[1][0], hidden[0])
            for kept, hidden in zip(past, inputs, strict=True)
            if kept is not None
        ]


def calibrate(model: DemoModel, layers: list[LayerKV], folder: Path) -> dict[str, Path]:
    """Write KVQuant's tables for 2 to 4 bits and RotateKV's; plain k-means."""
    heads, tokens, dim = layers[0].keys.shape
    positions = torch.arange(tokens)
    keys = [
        as_rows(model.rope(layer.keys, positions, inverse=True))[SINKS:]
        for layer in layers
    ]
    values = [as_rows(layer.values)[SINKS:] for layer in layers]
    orders = [rotatekv_tables.calibrate_order(rows, dim, heads) for rows in keys]
    files = {"rotatekv": folder / "rotatekv"}
    rotatekv_tables.write_tables(files["rotatekv"], orders, heads)
    for bits in (2, 3, 4):
        path = files[f"kvquant{bits}"] = folder / f"kvquant{bits}"
        found = [
            kvquant_tables.calibrate_layer(
                kvquant_tables.Samples(k, torch.ones_like(k)),
                kvquant_tables.Samples(v, torch.ones_like(v)),
                bits,
            )
            for k, v in zip(keys, values, strict=True)
        ]
        kvquant_tables.write_tables(path, found, 0.01)
    return files


def lines(files: dict[str, Path]) -> list[str]:
    """Name the codecs of the table."""
    return [
        *(f"split-planes:exponent_bits={e},mantissa_bits={m}" for e, m in PLANES),
        *(f"kivi:bits={bits}" for bits in (2, 4)),
        *(f"kvquant:tables={files[f'kvquant{bits}']}" for bits in (2, 3, 4)),
        f"rotatekv:tables={files['rotatekv']},bits=2,clip=0.8",
        *(f"rotatekv:tables={files['rotatekv']},bits={b},clip=1.0" for b in (3, 4)),
        *(f"turboquant:bits={bits}" for bits in (2, 3, 4)),
    ]


def encode(codec: Codec, layers: list[LayerKV]) -> tuple[list[Part], list[Part], str]:
    """Encode bfloat16 KV; return the parts and the mean draft errors as cells."""
    drafts, residuals, errors = [], [], torch.zeros(2, dtype=torch.float64)
    for index, layer in enumerate(layers):
        exact = layer.keys.bfloat16(), layer.values.bfloat16()
        sinks = massive_slots(layer.hidden) if codec.needs.resid_in else None
        positions = torch.arange(exact[0].shape[1])
        draft, residual = codec.encode(
            *exact, layer=index, positions=positions, sinks=sinks
        )
        for place, (entries, near, joined) in enumerate(
            zip(exact, codec.decode(draft), codec.join(draft, residual), strict=True)
        ):
            if not torch.equal(joined.view(torch.int16), entries.view(torch.int16)):
                raise SystemExit(f"{codec.identity}: layer {index} is not exact")
            wide = entries.double()
            errors[place] += (near.double() - wide).norm() / wide.norm() / len(layers)
        drafts.append(draft)
        residuals.append(residual)
    return drafts, residuals, f"{errors[0]:.4f} | {errors[1]:.4f}"


def mean_bits(parts: list[Part]) -> float:
    """Return measured bits per element over all layers."""
    return sum(part.bits for part in parts) / len(parts)


def main() -> None:
    """Print the table."""
    options = arguments()
    model = DemoModel(options.model)
    layers = model.read(options.context, options.seed)
    print(f"{options.model.name}, {layers[0].keys.shape[1]} tokens, bfloat16\n")
    print(
        "| codec | draft bits | residual bits | transferred | key error | value error |"
    )
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        other = model.read(options.context, options.seed + 1)
        for line in lines(calibrate(model, other, Path(folder))):
            codec = create_codec(line).bind(model.rope)
            drafts, residuals, errors = encode(codec, layers)
            travels = mean_bits(residuals)
            print(
                f"| `{line.replace(folder + '/', '')}` | {mean_bits(drafts):.2f} | "
                f"{travels:.2f} | {travels / 16:.3f} | {errors} |"
            )


if __name__ == "__main__":
    main()
