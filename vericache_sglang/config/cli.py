"""Command-line flags and the README table, both generated from the schema."""

from __future__ import annotations

import argparse

from vericache_sglang.config.schema import (
    Value,
    defaults,
    flag,
    kinds,
    options,
    parse,
)

TABLE_BEGIN = "<!-- settings:begin -->"
TABLE_END = "<!-- settings:end -->"

_METAVARS: dict[type, str] = {str: "NAME", int: "N", float: "X"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per field, as a group; flags not given leave no attribute.

    Values stay text until ``given_values``, so that a bad one is reported the same way
    whether a flag or a file holds it.
    """
    group = parser.add_argument_group("VeriCache")
    for name, opt in options().items():
        notes = (opt.unit, opt.bounds(), f"default {defaults()[name]}")
        described = f"{opt.help} ({', '.join(note for note in notes if note)})"
        group.add_argument(
            flag(name),
            dest=name,
            default=argparse.SUPPRESS,
            metavar=_METAVARS[kinds()[name]],
            help=described.replace("%", "%%"),
        )


def given_values(namespace: argparse.Namespace) -> dict[str, Value]:
    """Return the fields whose flags were given, as values of their types.

    Raises:
        ConfigError: A flag holds no value of its type, or one outside its bounds.
    """
    given = vars(namespace)
    return {name: parse(name, given[name]) for name in options() if name in given}


def settings_table() -> str:
    """Return the markdown table of every setting, with its two marker lines.

    The README holds exactly this text; a test compares them.
    """
    rows = ["| Setting | Flag | Default | Unit | Allowed | What it does |"]
    rows.append("|---|---|---|---|---|---|")
    for name, opt in options().items():
        cells = (
            f"`{name}`",
            f"`{flag(name)}`",
            f"`{defaults()[name]}`",
            opt.unit or "-",
            opt.bounds() or "-",
            opt.help,
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([TABLE_BEGIN, *rows, TABLE_END])
