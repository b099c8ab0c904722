"""Prints docs/hooks.md: ``python -m vericache_patches > docs/hooks.md``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_patches.apply import hooks
from vericache_patches.ledger import POSES, RELIED, WRITES
from vericache_sglang.platforms.cpu.hooks import HOOKS as CPU_HOOKS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vericache_patches.record import Hook, Patch

TITLE = """\
# What VeriCache hooks in SGLang 0.5.21

Written by `python -m vericache_patches > docs/hooks.md` from the records that the start
checks: a function that is missing, takes other arguments or, where its body is known,
does something else inside refuses to start. Registries and subclasses of SGLang carry
everything else: the algorithm and its worker, attention backends, the prefix cache, the
CPU platform; the launcher adds the routes of `GET /vericache`."""


def page() -> str:
    """Return the page."""
    writes = [
        (f"`{_name(each.owner)}`", _code(each.names), each.reason, each.remove_when)
        for each in WRITES
    ]
    relied = [
        (
            f"`{_name(each.target)}`",
            "body" if each.body else "arguments",
            each.reason,
            each.remove_when,
        )
        for each in RELIED
    ]
    poses = [f"- `{name}`: {what}" for name, what in POSES.items()]
    everywhere = hooks()
    return "\n\n".join(
        [
            TITLE,
            f"## On every machine: {len(everywhere)}",
            _hook_table(everywhere),
            f"## Without a GPU only: {len(CPU_HOOKS)}",
            _hook_table(CPU_HOOKS),
            "## Attributes set on SGLang's objects",
            _table(("class", "attributes", "why", "until"), writes),
            "## Relied on without a hook",
            _table(("function", "known", "why", "until"), relied),
            "## Names of SGLang that something of ours bears",
            "\n".join(poses),
        ]
    )


def _hook_table(pairs: Iterable[tuple[Patch, Hook]]) -> str:
    rows = [
        (
            f"`{_name(patch.target)}`",
            f"{patch.kind}, body" if patch.body else patch.kind,
            patch.reason,
            patch.remove_when,
        )
        for patch, _ in pairs
    ]
    return _table(("hooked", "how; body known", "why it stays", "until"), rows)


def _name(target: str) -> str:
    """Return module, class and function without the packages."""
    parts = target.split(".")
    first = next(
        (i for i, p in enumerate(parts) if p[:1].isupper() or p[:2] == "_G"), 0
    )
    return ".".join(parts[(first or len(parts) - 1) - 1 :])


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(page())
