"""What is set on SGLang's objects is in the ledger, and is what SGLang has."""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from vericache_patches.__main__ import page
from vericache_patches.apply import register, sglang_site
from vericache_patches.ledger import POSES, RELIED, WRITES
from vericache_patches.record import Symbol, UpstreamDriftError

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang

ROOT = Path(__file__).parents[2]
OURS = "vericache"
HOLDERS = {
    *("req", "kv", "model_runner", "manager", "layer", "params", "metrics_reporter"),
    *("scheduler", "tree_cache", "runner"),
}
"""Last names of expressions that are objects of SGLang wherever they occur."""
LEFT_OUT = {"evaluation", "simulation", "calibrate"}
"""Folders that alter servers to measure them, or have no SGLang."""


def sources() -> Iterator[Path]:
    for file in (ROOT / "vericache_sglang").rglob("*.py"):
        if not LEFT_OUT & {*file.relative_to(ROOT).parts}:
            yield file
    yield from (ROOT / "patches").rglob("*.py")


def written(code: str) -> set[str]:
    """Return the attributes that a source sets on objects of SGLang."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
            continue
        holder = ast.unparse(node.value).rpartition(".")[2]
        mine = node.attr.startswith(f"{OURS}_") and holder != "self"
        if mine or holder in HOLDERS:
            found.add(node.attr)
    return found


def test_every_write_is_in_the_ledger():
    known = {(n, file) for each in WRITES for n in each.names for file in each.files}
    found = {(n, file.name) for file in sources() for n in written(file.read_text())}
    assert found - known == set()


def test_what_the_ledger_lists_is_written():
    texts = {}
    for file in sources():
        texts[file.name] = texts.get(file.name, "") + file.read_text()
    for each in WRITES:
        assert [file for file in each.files if file not in texts] == []
        for name in each.names:
            assert any(f"{name}" in texts[file] for file in each.files), name


def test_a_new_write_would_be_seen():
    code = "a.req.vericache_x = 1\nreq.kv.length += 2\nx, layer.forward = 1, 2\n"
    assert written(code) == {"vericache_x", "length", "forward"}
    assert written("self.kv = 1\nself.vericache_x = 1\nstate.parts = 2\n") == set()


@pytest.mark.parametrize("each", WRITES, ids=lambda each: ",".join(each.names))
def test_sglang_has_what_is_overwritten(each):
    module, _, name = each.owner.rpartition(".")
    source = Path(find_spec(module).origin).read_text()
    (owner,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    has = {
        getattr(node, "attr", None) or getattr(node, "id", None) or node.name
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute | ast.Name | ast.FunctionDef)
    }
    for attribute in each.names:
        assert (attribute in has) is not attribute.startswith(OURS), attribute
    assert each.reason.endswith(".")
    assert each.remove_when.endswith(".")


def test_the_page_is_what_the_records_say():
    """Else: python -m vericache_patches > docs/hooks.md."""
    assert (ROOT / "docs" / "hooks.md").read_text() == page() + "\n"


def test_poses_are_names_of_sglang():
    from sglang.srt.speculative.spec_info import SpecInputType

    for name in POSES:
        assert hasattr(SpecInputType, name.rpartition(".")[2])


@pytest.mark.parametrize("symbol", RELIED, ids=lambda symbol: symbol.target)
def test_what_is_relied_on_is_as_it_was(symbol):
    symbol.check(sglang_site())


def test_a_drifted_function_that_nothing_hooks_stops_the_start(monkeypatch):
    gone = Symbol(
        target=f"{RELIED[0].target}_on", args=(), reason="r.", remove_when="w."
    )
    monkeypatch.setattr("vericache_patches.apply.RELIED", (gone,))
    with pytest.raises(UpstreamDriftError, match="forward_on"):
        register(())
