"""Records of what VeriCache needs of SGLang's source, with a check that it is there."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path

Hook = Callable[..., Any]


class UpstreamDriftError(RuntimeError):
    """SGLang no longer has a symbol, arguments or a body that VeriCache depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbol:
    """A function or method of SGLang as VeriCache knows it.

    Attributes:
        target: Dotted path, as ``HookRegistry.register`` takes it.
        args: Argument names of the target in the SGLang this was written against,
            in order, ``self`` included, ``*args`` and ``**kwargs`` with their stars.
        reason: Why no registry or subclass of SGLang can do it.
        remove_when: The upstream change after which this record is deleted.
        body: ``body_hash`` of the target where correctness depends on what it does
            inside; "" where arguments and result are all that matters.
    """

    target: str
    args: tuple[str, ...]
    reason: str
    remove_when: str
    body: str = ""

    def check(self, site: Path) -> None:
        """Compare ``target`` with SGLang's source under ``site``; imports nothing.

        Args:
            site: Folder that holds the ``sglang`` package.

        Raises:
            UpstreamDriftError: The symbol is missing, takes other arguments, or does
                something else inside.
        """
        source, function = find_function(site, self.target)
        args = _names(function.args)
        if args != self.args:
            raise UpstreamDriftError(
                f"{self.target}: expected {self.args}, found {args}"
            )
        body = body_hash(source, function)
        if self.body not in ("", body):
            raise UpstreamDriftError(
                f"{self.target}: expected the body {self.body}, found {body}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch(Symbol):
    """One hooked symbol.

    Attributes:
        kind: How the hook runs (``sglang.srt.plugins.hook_registry.HookType``).
    """

    kind: Literal["before", "after", "around", "replace"]


Function = ast.FunctionDef | ast.AsyncFunctionDef


def find_function(site: Path, target: str) -> tuple[str, Function]:
    """Return the source of a module and the function or method ``target`` in it.

    Args:
        site: Folder that holds the top package of ``target``.
        target: Dotted path of module, classes and function.

    Raises:
        UpstreamDriftError: No such module, class or function.
    """
    file, names = _split(site, target)
    source = file.read_text(encoding="utf-8")
    body = _parsed(source)
    for name in names[:-1]:
        body = _defined(body, name, target, ast.ClassDef).body
    function = _defined(body, names[-1], target, ast.FunctionDef, ast.AsyncFunctionDef)
    return source, function


def body_hash(source: str, function: Function) -> str:
    """Hash the statements of a function; comments and docstring do not count.

    Args:
        source: The module's source.

    Returns:
        12 hexadecimal digits, the same under every version of Python.
    """
    statements = function.body
    if ast.get_docstring(function, clean=False) is not None:
        statements = statements[1:]
    if not statements:
        return hashlib.sha256().hexdigest()[:12]
    last = statements[-1].end_lineno
    lines = source.splitlines()[statements[0].lineno - 1 : last]
    code = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:12]


@lru_cache(maxsize=1)  # a tree is large, and records are checked file by file
def _parsed(source: str) -> list[ast.stmt]:
    return ast.parse(source).body


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
