"""Record of a patch, with a check that it still matches SGLang's source."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path

Hook = Callable[..., Any]


class UpstreamDriftError(RuntimeError):
    """SGLang no longer has the symbol, or the arguments, a patch was written for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One hooked SGLang symbol.

    Attributes:
        target: Dotted path, as ``HookRegistry.register`` takes it.
        kind: How the hook runs (``sglang.srt.plugins.hook_registry.HookType``).
        args: Argument names of the target in the SGLang this was written against,
            in order, ``self`` included, ``*args`` and ``**kwargs`` with their stars.
        reason: Why no registry or subclass of SGLang can do it.
        remove_when: The upstream change after which this file is deleted.
        where: ``cpu`` if the hook replaces a kernel that needs a GPU; such a patch is
            skipped on machines with a GPU.
    """

    target: str
    kind: Literal["before", "after", "around", "replace"]
    args: tuple[str, ...]
    reason: str
    remove_when: str
    where: Literal["any", "cpu"] = "any"

    def check(self, site: Path) -> None:
        """Compare ``target`` with SGLang's source under ``site``; imports nothing.

        Args:
            site: Folder that holds the ``sglang`` package.

        Raises:
            UpstreamDriftError: The symbol is missing or takes other arguments.
        """
        found = find_args(site, self.target)
        if found != self.args:
            raise UpstreamDriftError(
                f"{self.target}: expected {self.args}, found {found}"
            )


def find_args(site: Path, target: str) -> tuple[str, ...]:
    """Read the argument names of a function or method from source.

    Args:
        site: Folder that holds the top package of ``target``.
        target: Dotted path of module, classes and function.

    Raises:
        UpstreamDriftError: No such module, class or function.
    """
    file, names = _split(site, target)
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for name in names[:-1]:
        body = _defined(body, name, target, ast.ClassDef).body
    function = _defined(body, names[-1], target, ast.FunctionDef, ast.AsyncFunctionDef)
    return _names(function.args)


def _split(site: Path, target: str) -> tuple[Path, list[str]]:
    """Return the module's file and the names inside it."""
    parts = target.split(".")
    for count in range(len(parts) - 1, 0, -1):
        stem = site.joinpath(*parts[:count])
        for file in (stem.with_suffix(".py"), stem / "__init__.py"):
            if file.is_file():
                return file, parts[count:]
    raise UpstreamDriftError(f"{target}: no such module under {site}")


def _defined(body: list[ast.stmt], name: str, target: str, *kinds: type) -> Any:
    """Return the last definition of ``name`` in ``body``, as Python would bind it."""
    found = [
        node
        for node in body
        if isinstance(node, kinds) and getattr(node, "name", None) == name
    ]
    if not found:
        raise UpstreamDriftError(f"{target}: no {name!r} there")
    return found[-1]


def _names(args: ast.arguments) -> tuple[str, ...]:
    """List argument names as a signature does, stars included."""
    names = [arg.arg for arg in [*args.posonlyargs, *args.args]]
    if args.vararg:
        names.append(f"*{args.vararg.arg}")
    names += [arg.arg for arg in args.kwonlyargs]
    if args.kwarg:
        names.append(f"**{args.kwarg.arg}")
    return tuple(names)
