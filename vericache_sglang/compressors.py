"""The command that lists every compression method and what each is like."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vericache_sglang.compression.catalog import (
    CODECS,
    create_compressor,
    find_method,
    known_names,
)
from vericache_sglang.compression.codecs.base import PartShape
from vericache_sglang.compression.codecs.kvquant_tables import KVQuantTables
from vericache_sglang.compression.codecs.rotatekv_tables import RotateKVTables
from vericache_sglang.compression.compressor import Compressor
from vericache_sglang.errors import VeriCacheError
from vericache_sglang.former_names import with_former_names

if TYPE_CHECKING:
    from collections.abc import Sequence

PART_SHAPE = PartShape(
    heads=8, tokens=4096, key_dim=128, value_dim=128, dtype=torch.bfloat16
)
"""Shape of the layer for which sizes are listed."""

TABLE_BITS = 4
"""Width of the codes in tables that stand in for a calibration file."""

HEADER = f"""\
What --vericache-compressor takes: SELECTOR, CODEC or SELECTOR+CODEC, each of the form
name or name:option=value,option=value.

bits      per element that stays on the device, scales and other overhead included
transfer  share of the KV that a verification brings back

Both with default options, for {PART_SHAPE.tokens} tokens of {PART_SHAPE.heads} KV \
heads of {PART_SHAPE.key_dim} in bfloat16;
kvquant with {TABLE_BITS}-bit tables, split-planes without escapes (the KV decides \
how many)."""

COLUMNS = ("name", "kind", "mode", "scenarios", "bits", "transfer", "needs")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedMethod:
    """One compression method, as the listing shows it.

    Attributes:
        name: Name in a line of ``--vericache-compressor``.
        paper: See ``About``, also for kind, mode, scenarios and licence.
        needs: Inputs that the runtime must supply, in words.
        draft_bits: Bits per element of the draft KV, overheads included.
        transfer: Bytes of the residual KV over those of the full KV; None: 1 - keep.
        options: ``name=default`` of every option.
        origin: Package of a third-party method; "" for a built-in one.
        error: Why a third-party method cannot be described; "" if it can.
    """

    name: str
    paper: str = ""
    kind: str = ""
    mode: str = ""
    scenarios: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    draft_bits: float | None = None
    transfer: float | None = None
    options: tuple[str, ...] = ()
    licence: str = ""
    origin: str = ""
    error: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return the cells of ``COLUMNS``."""
        bits = "?" if self.draft_bits is None else f"{self.draft_bits:.2f}"
        transfer = "1 - keep" if self.transfer is None else f"{self.transfer:.2f}"
        return (
            *(self.name, self.kind, self.mode, " ".join(self.scenarios)),
            *(
                bits,
                "?" if self.error else transfer,
                ", ".join(self.needs) or "nothing",
            ),
        )

    def details(self) -> str:
        """Return origin and options, for below the table."""
        facts = {
            "paper": self.paper or "unknown",
            "options": " ".join(self.options) or "none",
            "licence of the reference": self.licence or "unknown",
            "from": self.origin,
            "cannot be shown": self.error,
        }
        lines = (f"  {fact}: {text}" for fact, text in facts.items() if text)
        return "\n".join([self.name, *lines])


def rows() -> list[ListedMethod]:
    """Return every known method, sorted by name; loads third-party code."""
    return [_row(name) for name in known_names()]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vericache_sglang.compressors", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    asked = parser.parse_args(argv)
    listed = rows()
    if asked.json:
        part_shape = asdict(PART_SHAPE) | {
            "dtype": str(PART_SHAPE.dtype).removeprefix("torch.")
        }
        methods = [asdict(row) for row in listed]
        listing = with_former_names(
            "listing", {"shape": part_shape, "methods": methods}
        )
        print(json.dumps(listing, indent=1))
    else:
        print(HEADER, _table(listed), *(row.details() for row in listed), sep="\n\n")
    return 0


def _row(name: str) -> ListedMethod:
    """Describe one method; if a third-party method fails, return its error."""
    origin = ""
    options: tuple[str, ...] = ()
    try:
        method = find_method(name)
        origin = method.origin
        options = tuple(option.spelled() for option in method.options.values())
        example = _example(name)
    except (VeriCacheError, ImportError, AttributeError, TypeError) as error:
        return ListedMethod(name=name, origin=origin, options=options, error=str(error))
    about, codec = example.about, example.codec
    return ListedMethod(
        name=name,
        paper=about.paper,
        kind=about.kind,
        mode=about.mode,
        scenarios=about.scenarios,
        needs=_needs(example),
        draft_bits=codec.draft_bits(PART_SHAPE)
        if codec
        else 8.0 * PART_SHAPE.dtype.itemsize,
        transfer=codec.transfer_fraction(PART_SHAPE) if codec else None,
        options=options,
        licence=about.licence,
        origin=origin,
    )


def _example(name: str) -> Compressor:
    """Build a method with its default options and placeholder calibration tables."""
    if name not in CODECS:
        return create_compressor(name, 0)
    return Compressor(line=name, codec=CODECS[name](**_tables(name)))


def _tables(name: str) -> dict[str, Any]:
    """Return the required options of a built-in codec."""
    nowhere, columns = Path("example"), PART_SHAPE.heads * PART_SHAPE.key_dim
    if name == "kvquant":
        low, book = torch.zeros(1, columns), torch.zeros(1, 1 << TABLE_BITS)
        thresholds = low, low + 1
        return {"tables": KVQuantTables(nowhere, "", 0.01, *thresholds, book, book)}
    if name == "rotatekv":
        order = torch.arange(columns)[None]
        return {"tables": RotateKVTables(nowhere, "", 1, order)}
    return {}


def _needs(compressor: Compressor) -> tuple[str, ...]:
    """Describe in words the inputs that a compressor's parts need."""
    needs, words = compressor.needs, []
    if compressor.selector is not None:
        words = [
            "keys" if needs.keys else "",
            f"last {needs.q_tail} queries" if needs.q_tail else "",
            "queries" if needs.q_stream else "",
            "attention inputs" if needs.hidden else "",
            "further forwards" if needs.probes else "",
        ]
    if compressor.codec is not None:
        codec = compressor.codec.needs
        words += [
            f"a file of {codec.artifact}" if codec.artifact else "",
            "positions of the keys" if codec.rope else "",
            "layer inputs for its sinks" if codec.resid_in else "",
        ]
    if compressor.token_align > 1:
        words.append(f"multiples of {compressor.token_align} tokens")
    return tuple(filter(None, words))


def _table(listed: Sequence[ListedMethod]) -> str:
    """Pad the cells of all rows to the width of their columns."""
    lines = [COLUMNS, *(row.cells() for row in listed)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) for cell, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


if __name__ == "__main__":
    sys.exit(main())
