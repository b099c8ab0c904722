"""README and map name only what exists, and say what is true of the code."""

import re
from pathlib import Path

import pytest

from vericache_sglang.compression import catalog
from vericache_sglang.compression.base import SELECTORS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "AGENTS.md"])
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text())
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "AGENTS.md"])
def test_every_script_that_is_named_exists(page):
    named = re.findall(r"scripts/[\w/]+\.(?:sh|py|json)", (ROOT / page).read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_readme_lists_every_compressor_of_ours():
    table = (ROOT / "README.md").read_text()
    selectors = r"^\| `([\w-]+)` \| [^|]+ \| [^|]*(?:arXiv|none)"
    assert set(re.findall(selectors, table, re.M)) == set(SELECTORS.names())
    codecs = r"^\| `([\w-]+)` \| [^|]+ \| [^|]+ \| [^|]*(?:arXiv|ours)"
    assert set(re.findall(codecs, table, re.M)) == set(catalog.CODECS)
