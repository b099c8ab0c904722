"""README, map and docs name only what exists, and say what is true of the code."""

import re
from pathlib import Path

import pytest

from vericache_sglang.compression import catalog
from vericache_sglang.compression.base import SELECTORS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


PAGES = ["README.md", "AGENTS.md", *sorted(f"docs/{p.name}" for p in DOCS.glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    file = ROOT / page
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", file.read_text())
    assert [link for link in links if not (file.parent / link).exists()] == []


def test_the_readme_is_short_and_leads_to_every_page():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert [page for page in PAGES[1:] if f"({page})" not in text] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_script_that_is_named_exists(page):
    named = re.findall(
        r"(?<!tests/)scripts/[\w/]+\.(?:sh|py|json)", (ROOT / page).read_text()
    )
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_page_lists_every_compressor_of_ours():
    table = (DOCS / "compressors.md").read_text()
    selectors = r"^\| `([\w-]+)` \| [^|]+ \| [^|]*(?:arXiv|none)"
    assert set(re.findall(selectors, table, re.M)) == set(SELECTORS.names())
    codecs = r"^\| `([\w-]+)` \| [^|]+ \| [^|]+ \| [^|]*(?:arXiv|ours)"
    assert set(re.findall(codecs, table, re.M)) == set(catalog.CODECS)
