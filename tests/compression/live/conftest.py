"""Tiny random models, and kvpress beside them: the published code answers live."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from bare_packages import load_kvpress, load_quanto, why_missing
from hf_runtime import TOKENS, prefill
from tiny_models import build, write_tokenizer


@pytest.fixture(scope="session")
def presses():
    """Return kvpress' classes by name; skip where it is not installed."""
    if reason := why_missing("kvpress"):
        pytest.skip(reason)
    return load_kvpress()


@pytest.fixture(scope="session")
def quanto():
    """Return optimum-quanto's tensors; skip where it is not installed."""
    if reason := why_missing("optimum-quanto"):
        pytest.skip(reason)
    return load_quanto()


@pytest.fixture(scope="session")
def prompts(presses, tmp_path_factory):
    """Return a function from a model's name to a prompt it ran, once."""
    known = {}

    def prompt(name, dtype=torch.float32, template=None, tokens=TOKENS):
        key = name, dtype, template, tokens
        if key not in known:
            folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), template)
            known[key] = prefill(build(name, folder).to(dtype), tokens)
        return known[key]

    return prompt
