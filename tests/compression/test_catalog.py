"""Every line that names a compressor, and every line that does not."""

import sys

import pytest
import torch

from vericache_sglang.compression.base import SELECTORS
from vericache_sglang.compression.catalog import (
    CODECS,
    OURS,
    create_compressor,
    known_names,
)
from vericache_sglang.compression.codecs.rotatekv_tables import write_tables
from vericache_sglang.errors import CompressionError, ConfigError

THIRD_PARTY = """
from vericache_sglang.compression.codecs.base import Codec
from vericache_sglang.compression.codecs.kivi import KIVI
from vericache_sglang.compression.compressor import Compressor
from vericache_sglang.compression.keynorm import KeyNorm
from vericache_sglang.compression.recency import Recency


class Aged(Recency):
    def __init__(self, seed, *, years: int = 3, soft=False, name="x", rate=0.5):
        self.given = (seed, years, soft, name, rate)


def packed(seed, bits=4):
    return KIVI(bits=bits)


def pair(seed, **options):
    return Compressor(line="", selector=KeyNorm(seed), codec=KIVI(**{
        name: int(value) for name, value in options.items()
    }))


class Bare(KIVI):
    pass


def neither(seed):
    return Compressor(line="")
"""
ENTRIES = {
    "aged": "Aged",
    "packed": "packed",
    "pair": "pair",
    "bare": "Bare",
    "neither": "neither",
    "snapkv": "Aged",
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a package of compressors for one test."""
    info = tmp_path / "theirs-7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 7\n")
    entries = [f"{name} = theirs_module:{what}" for name, what in ENTRIES.items()]
    group = "[vericache_sglang.compressors]"
    (info / "entry_points.txt").write_text("\n".join([group, *entries, ""]))
    (tmp_path / "theirs_module.py").write_text(THIRD_PARTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    monkeypatch.delitem(__import__("sys").modules, "theirs_module", raising=False)


SPLIT = "split-planes@1(exponent_bits=4,mantissa_bits=3,block=64)"
KIVI = "kivi@1(bits=2,group=32,window=32)"
VALID = [
    ("keynorm", "keynorm@1(seed=3)"),
    (" keynorm ", "keynorm@1(seed=3)"),
    ("snapkv", "snapkv@1(pooling=5,seed=3)"),
    ("snapkv:", "snapkv@1(pooling=5,seed=3)"),
    ("snapkv:pooling=7", "snapkv@1(pooling=7,seed=3)"),
    ("kvzap:threshold=-4.5", "kvzap@1(weights=,threshold=-4.5,seed=3)"),
    (
        "kvzip: chunk = 64 , plus = true",
        r"kvzip@1(chunk=64,plus=true,prefix=0,suffix=\n,seed=3)",
    ),
    ("split-planes", SPLIT),
    ("kivi:bits=4", "kivi@1(bits=4,group=32,window=32)"),
    ("turboquant:bits=3,seed=9", "turboquant@1(bits=3,seed=9)"),
    ("recency+split-planes", f"recency@1(seed=3)+{SPLIT}"),
    ("recency + kivi", f"recency@1(seed=3)+{KIVI}"),
    (
        "snapkv:pooling=1+kivi:bits=4,group=16",
        "snapkv@1(pooling=1,seed=3)+kivi@1(bits=4,group=16,window=32)",
    ),
    (
        "expected-attention:epsilon=1e+2,covariance=false+kivi",
        "expected-attention@1(future=512,sinks=4,covariance=false,value_norm=true,"
        f"epsilon=100.0,seed=3)+{KIVI}",
    ),
]


@pytest.mark.parametrize(("line", "identity"), VALID)
def test_a_line_says_selector_codec_and_all_their_options(line, identity):
    compressor = create_compressor(line, 3)
    assert compressor.identity == identity
    assert compressor.line == line
    parts = (compressor.selector, compressor.codec)
    assert sum(part is not None for part in parts) == identity.count("@")
    assert compressor.about.scenarios


FLAG = "--vericache-compressor"
INVALID = [
    ("", f"{FLAG}: unknown compressor ''; known: .*keynorm.*split-planes"),
    ("nope", f"{FLAG}: unknown compressor 'nope'; known: expected-att.*kivi.*snapkv"),
    ("snapkv+nope:bits=2", f"{FLAG}: unknown compressor 'nope'; known:"),
    ("snapkv:width=3", f"{FLAG}: 'snapkv:width=3': compressor 'snapkv': .*'width'; "),
    ("snapkv:seed=3", "unknown or repeated parameter 'seed'; known: pooling"),
    ("keynorm:p=2", "unknown or repeated parameter 'p'; known: none"),
    ("snapkv:pooling=3,pooling=3", "repeated parameter 'pooling'"),
    (
        "snapkv:pooling=wide",
        "pooling must be of type int, got 'wide'; the default is 5",
    ),
    ("snapkv:pooling=2.5", "pooling must be of type int, got '2.5'"),
    ("snapkv:pooling", "pooling must be of type int, got ''"),
    ("snapkv:pooling=4", f"{FLAG}: 'snapkv:pooling=4': pooling must be odd"),
    ("kvzip:plus=yes", "plus must be of type bool, got 'yes'; the default is false"),
    ("kvzap:threshold=low", "threshold must be of type float, got 'low'"),
    ("snapkv:pooling=-1", "must be odd and >= 1, got -1"),
    ("observed:queries=0", "queries must be >= 1, got 0"),
    ("kvzip:chunk=0", "chunk must be >= 1 token, got 0"),
    ("kvzip:prefix=-1", "prefix must be >= 0 tokens, got -1"),
    ("expected-attention:future=0", "future must be >= 1, got 0"),
    ("expected-attention:future=5000", "future must be <= 4096, got 5000"),
    ("expected-attention:sinks=-1", "sinks must be >= 0, got -1"),
    ("expected-attention:epsilon=-0.5", "epsilon must be >= 0, got -0.5"),
    ("expected-attention:epsilon=nan", "epsilon must be >= 0, got nan"),
    ("kivi:bits=1", "bits must be 2 to 8, got 1"),
    ("kivi:group=0", "group must be >= 1, got 0"),
    ("kivi:window=48", "window must be 0 or a multiple of group 32, got 48"),
    ("kivi:window=-32", "window must be 0 or a multiple of group 32, got -32"),
    ("split-planes:exponent_bits=0", "exponent_bits must be 1 to 7, got 0"),
    ("split-planes:exponent_bits=8", "exponent_bits must be 1 to 7, got 8"),
    ("split-planes:mantissa_bits=4", "0 to 3 beside 4 exponent bits, got 4"),
    ("split-planes:mantissa_bits=-1", "mantissa_bits must be 0 to 3"),
    ("split-planes:block=0", "block must be >= 1 token, got 0"),
    ("turboquant:bits=9", "bits must be 1 to 8, got 9"),
    ("recency+kivi:bits=9", f"{FLAG}: 'kivi:bits=9': kivi: bits must be 2 to 8"),
    ("recency+kivi:tables=x", "codec 'kivi': .*'tables'; known: bits, group, window"),
    ("kvquant", f"{FLAG}: 'kvquant': codec 'kvquant': parameter 'tables' is missing"),
    ("rotatekv:tables=/no/file", f"{FLAG}: .*: /no/file: cannot be read"),
    (
        "kivi+recency",
        "must be a selector, a codec, or SELECTOR.CODEC; selectors: exp.*key",
    ),
    ("kivi+split-planes", f"{FLAG}: 'kivi.split-planes' must be a selector, a codec"),
    ("recency+keynorm", "must be a selector, a codec.*; codecs: kivi, kvquant"),
    ("recency+kivi+kivi", "must be a selector, a codec"),
]


@pytest.mark.parametrize(("line", "says"), INVALID)
def test_a_line_that_says_nothing_is_refused_by_flag_and_part(line, says):
    with pytest.raises(ConfigError, match=says):
        create_compressor(line, 0)


def test_tables_are_read_from_the_file_that_a_line_names(tmp_path):
    tables = write_tables(tmp_path / "order+1", [torch.arange(64)], 2)
    line = f"recency+rotatekv:bits=4,tables={tables.source}"
    compressor = create_compressor(line, 0)
    assert compressor.codec.tables.digest == tables.digest
    assert f"tables={tables.digest},bits=4" in compressor.identity


def test_names_are_of_selectors_codecs_and_third_parties(installed):
    names = {*SELECTORS.names(), *CODECS, *ENTRIES}
    assert set(known_names()) == names
    assert list(known_names()) == sorted(names)
    assert set(SELECTORS.names()).isdisjoint(CODECS)
    assert {SELECTORS[name] for name in SELECTORS.names()} == set(OURS)


def test_a_third_party_gets_the_seed_and_options_of_its_types(installed):
    compressor = create_compressor("aged:years=5,soft=true,name=a b,rate=2", 11)
    assert compressor.selector.given == (11, 5, True, "a b", 2.0)
    assert compressor.identity == (
        "aged@7(years=5,soft=true,name=a b,rate=2.0,seed=11)"
    )
    with pytest.raises(ConfigError, match=r"'aged': unknown .* known: years, soft, na"):
        create_compressor("aged:months=3", 0)


def test_a_third_party_may_make_a_codec_or_a_whole_compressor(installed):
    assert create_compressor("packed:bits=3", 0).codec.bits == 3
    assert create_compressor("keynorm+packed", 0).codec.bits == 4
    assert create_compressor("bare:bits=8", 7).codec.bits == 8
    pair = create_compressor("pair:bits=4,group=8", 5)
    assert (pair.codec.bits, pair.codec.group) == (4, 8)
    assert pair.selector.seed == 5
    assert pair.line == "pair:bits=4,group=8"
    assert "KeyNorm(seed=5)+kivi@1(bits=4,group=8,window=32)" in pair.identity
    with pytest.raises(ConfigError, match="repeated parameter 'seed'"):
        create_compressor("pair:seed=4", 0)
    with pytest.raises(ConfigError, match=r"'pair.kivi' must be a selector, a codec"):
        create_compressor("pair+kivi", 0)
    with pytest.raises(ConfigError, match=r"'neither': .* neither a selector nor"):
        create_compressor("neither", 0)


def test_our_names_win_over_third_parties(installed):
    assert type(create_compressor("snapkv", 0).selector) is SELECTORS["snapkv"]


def test_an_entry_point_that_makes_something_else_is_refused(tmp_path, monkeypatch):
    info = tmp_path / "bad-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vericache_sglang.compressors]\nbad = fractions:Fraction\nc = builtins:bool\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    says = r"'bad' \(fractions:Fraction\) is a Fraction, not a Selector, a Codec or a C"
    with pytest.raises(CompressionError, match=says):
        create_compressor("bad", 1)
    with pytest.raises(CompressionError, match=r"'c' .* is a bool, not a Selector"):
        create_compressor("c", 1)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("import no_such_module", r"'bad' of .*bad_module:Bad.* 'no_such_module'"),
        ("raise SystemExit(3)", r"'bad' of .*bad_module:Bad.* SystemExit\(3\)"),
        ("1 +", r"'bad' of .*bad_module:Bad.* SyntaxError"),
        ("Good = 1", r"'bad' of .*bad_module:Bad.* no attribute 'Bad'"),
        ("def Bad(seed): 1 / 0", r"'bad' \(bad_module:Bad\): ZeroDivisionError"),
        ("def Bad(seed): exit(2)", r"'bad' \(bad_module:Bad\): SystemExit\(2\)"),
    ],
)
def test_a_broken_package_is_named_and_leaves_the_others_usable(
    tmp_path, monkeypatch, module, says
):
    info = tmp_path / "bad-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vericache_sglang.compressors]\nbad = bad_module:Bad\ngood = "
        "vericache_sglang.compression.recency:Recency\n"
    )
    (tmp_path / "bad_module.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with pytest.raises(ConfigError, match=says):
            create_compressor("bad", 1)
    finally:
        sys.modules.pop("bad_module", None)
    assert create_compressor("good", 1).selector is not None
    assert create_compressor("recency", 1).selector is not None
