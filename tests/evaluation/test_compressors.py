"""The table of compressors: its arithmetic by hand, its page, and one line served."""

import re
from argparse import Namespace

import pytest
from live_server import MODEL, fork, run

from vericache_sglang.evaluation.benchmark import REPOSITORY
from vericache_sglang.evaluation.benchmarks import compressors
from vericache_sglang.evaluation.benchmarks.compressors import (
    LENGTHS,
    count_cycles,
    draw,
    engine_for,
    page,
    serve_line,
    sizes,
    wave,
)
from vericache_sglang.evaluation.benchmarks.tool_calls import exact
from vericache_sglang.evaluation.compressor_lines import (
    DEFAULT,
    Line,
    lines,
    packed_part_shape,
)
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.timers import Sums

PARTS = {"offered": 100, "kept": 50, "coded": 40, "slots": 20}


def answer(rounds, accepted, drafted=0):
    """Return an answer over 100 prompt tokens, with figures made up."""
    told = {"cycles": rounds, "drafted": drafted, "accepted": accepted}
    told["staged_bytes"] = 200_000 * rounds
    return {"prompt_tokens": 100, "vericache": told}


def summed(prompt=100, seconds=0.02):
    sums = Sums(prompt=prompt, split=PARTS)
    sums.seconds["cpu"]["split"] = seconds
    return sums


def row(compressor="snapkv", keep=0.25, wrong=()):
    """Return a row for four requests, with figures made up."""
    line = Line(compressor, keep)
    cycles = {
        str(length): count_cycles([answer(4, 40, 4 * length)] * 4, length)
        for length in LENGTHS
    }
    return {
        "name": line.name,
        "compressor": line.compressor,
        "label": line.label,
        "keep": keep,
        **sizes(line, MODEL, [summed()] * 4, cycles),
        "lengths": cycles,
        "exact": [4, 4, 3, 4],
        "exact_alone": 1,
        "wrong": list(wrong),
        "commit": "abc",
    }


def report(*rows):
    return {
        "provenance": {
            "command": "python -m vericache_sglang.bench compressors",
            "date": "2026-01-02T03:04:05+00:00",
            "hardware": {"cpu": "a cpu"},
            "versions": {"sglang": "1", "torch": "2"},
        },
        "options": {"model": "demo-model"},
        "requests": 4,
        "prompt_tokens": [1000, 2000, 3500, 4000],
        "full_kv": {"exact": 4},
        "rows": list(rows),
    }


def test_selectors_have_a_line_per_kept_share_and_codecs_one():
    found = lines(["snapkv", "kivi:bits=4", "snapkv+kivi:bits=4"], [0.25, 0.125])
    assert [(line.compressor, line.keep) for line in found] == [
        ("snapkv", 0.25),
        ("snapkv", 0.125),
        ("kivi:bits=4", None),
        ("snapkv+kivi:bits=4", 0.25),
        ("snapkv+kivi:bits=4", 0.125),
    ]


def test_every_default_line_can_be_made_and_is_told_apart(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    found = lines(DEFAULT, [0.25, 0.125])
    assert len({line.name for line in found}) == len(found) == 36
    assert len({(line.label, line.keep) for line in found}) == len(found)
    assert not any("/" in line.label for line in found)


@pytest.mark.parametrize(
    ("compressor", "bits", "transfer"),
    [
        # 50 of 100 tokens kept, none packed: 16 bits of each.
        ("snapkv", 16 * 50 / 100, 50 / 100),
        # 40 packed to 4 bits and, per 32 numbers, a scale and a zero of 16; 10 exact.
        ("snapkv+kivi:bits=4", ((4 + 32 / 32) * 40 + 16 * 10) / 100, 90 / 100),
        # Sign, 3 and 1 bits and 8 for a block of 64; 6 of 16 bits come back.
        (
            "snapkv+split-planes:exponent_bits=3,mantissa_bits=1",
            ((5 + 8 / 64) * 40 + 16 * 10) / 100,
            (50 + 40 * 6 / 16) / 100,
        ),
    ],
)
def test_calculated_sizes_are_those_by_hand(compressor, bits, transfer):
    parts = {"offered": 100, "kept": 50, "coded": 0 if bits == 8 else 40}
    line, packed = Line(compressor, 0.5), packed_part_shape(2, 64)
    assert line.device_bits(parts, packed) == pytest.approx(bits)
    assert line.transfer_bfloat16(parts, packed) == pytest.approx(transfer)


def test_measured_sizes_are_those_by_hand():
    cycles = {"8": count_cycles([answer(2, 10), answer(3, 10)], 8)}
    found = sizes(Line("snapkv", 0.5), MODEL, [summed(300, 0.03), summed()], cycles)
    assert found["kept_share"] == pytest.approx(0.5)
    assert found["device_share"] == pytest.approx(0.2)
    # 5 verifications of 200,000 bytes; the KV of a token has 4,096, a prompt's 409,600.
    assert found["transfer"] == pytest.approx(200_000 / 409_600)
    # 50 ms for 400 tokens.
    assert found["compress_ms_per_1k"] == pytest.approx(125.0)


def test_cycles_are_summed():
    # 17 tokens need 2 cycles of 9 at least, 6 tokens need 1.
    assert count_cycles([answer(2, 15, 16), answer(3, 3, 24)], 8) == {
        "cycles": 5,
        "drafted": 40,
        "accepted": 18,
        "staged_bytes": 1_000_000,
        "fewest": 3,
        "prompt_reads": 500,
    }


def test_the_page_has_every_row_and_whole_tables():
    planes = "split-planes:exponent_bits=3,mantissa_bits=1"
    late = {**row(planes, None), "commit": "def"}
    text = page(report(row(wrong=[{}, {}]), late))
    assert "commit abc, def, 2026-01-02" in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    served, alone = cells[1:]
    assert served[0] == "`snapkv`"
    assert served[6:8] == ["10.0 / 10.0 / 10.0 / 10.0", "0.333"]
    assert served[-3:] == ["1 of 4", "3 of 4", "2"]
    assert (alone[0], alone[1], alone[-1]) == (f"`{planes}`", "", "0")
    # 44 tokens are 5, 3, 2 and 1 cycles of up to 8, 16, 32 and 64 drafts.
    assert "7.8 to 7.8 / 13.7 to 13.7 / 21.0 to 21.0 / 43.0 to 43.0" in text
    assert max(map(len, re.findall(r"^[^|`].*$", text, re.M))) < 250


@pytest.mark.extended
@pytest.mark.server
def test_a_line_is_served_verified_and_alone(monkeypatch):
    """A method that forgets most: wrong on its own, as full KV under VeriCache."""
    monkeypatch.setattr(compressors, "LENGTHS", (8, 32))
    prompts = draw(MODEL, 1200, each=2, seed=3)
    plain = described("plain", None, engine_for(1200, 4))
    full = run(plain, MODEL, [wave(prompts, None)])["waves"][0]
    assert len({tuple(answer["ids"]) for answer in full}) == 4
    options = Namespace(model=MODEL, context=1200)
    found = serve_line(Line("keynorm", 0.125), options, prompts, full, fork)
    assert found["wrong"] == []
    assert found["exact"] == [exact(full, prompts)] * 2
    assert found["exact_alone"] < exact(full, prompts)
    assert found["transfer"] == pytest.approx(0.875, abs=0.01)
    assert found["kept_share"] == pytest.approx(0.125, abs=0.01)
    assert found["compress_ms_per_1k"] > 0
    for length, sums in found["lengths"].items():
        assert 4 < sums["cycles"] <= sums["accepted"], length
        # A server of its own mind drafts a few tokens of a method this bad.
        mean = sums["drafted"] / sums["cycles"]
        assert int(length) / 3 < mean <= int(length)
