"""The command line: what it writes, and what it refuses by name."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from vericache_sglang.calibrate.__main__ import main
from vericache_sglang.calibrate.texts import prompts
from vericache_sglang.compression.base import ModelSpec
from vericache_sglang.compression.codecs.artifact import (
    FORMAT,
    CalibratedModel,
    read_artifact,
    write_artifact,
)
from vericache_sglang.compression.codecs.catalog import create_codec
from vericache_sglang.compression.codecs.fingerprint import model_fingerprint
from vericache_sglang.compression.codecs.kvquant_tables import KVQuantTables
from vericache_sglang.compression.codecs.rotatekv_tables import RotateKVTables
from vericache_sglang.compression.codecs.split_planes import SplitPlanes
from vericache_sglang.errors import CompressionError, ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
DEMO = CONFIGS / "demo-model"
SPEC = ModelSpec(layers=4, query_heads=4, kv_heads=2, head_dim=64, name=str(DEMO))
SHIPPED = {
    "kvquant-2bit": KVQuantTables,
    "kvquant-4bit": KVQuantTables,
    "rotatekv": RotateKVTables,
}


def test_the_planes_of_the_demo_model_are_chosen_and_saved(tmp_path, capsys):
    out, page = tmp_path / "planes.json", tmp_path / "planes.md"
    words = f"split-planes {DEMO} --context 300 --samples 2 --answer 20 --drafts 4 8"
    words += " --exponent-bits 3 --mantissa-bits 1 2 --compare kivi:bits=2"
    words += f" --out {out} --markdown {page}"
    assert main(words.split()) == 0
    assert page.read_text() == capsys.readouterr().out
    saved = json.loads(out.read_text())
    lines = [point["compressor"] for point in saved["points"]]
    assert lines == [
        "split-planes:exponent_bits=3,mantissa_bits=2",
        "split-planes:exponent_bits=3,mantissa_bits=1",
        "kivi:bits=2",
    ]
    assert saved["provenance"]["argv"] == words.split()
    assert saved["model"]["fingerprint"] == model_fingerprint(DEMO)
    assert isinstance(create_codec(saved["choice"]["compressor"]), SplitPlanes)
    for point in saved["points"]:
        for length, mean in point["accepted"].items():
            assert 0 <= mean <= saved["all_accepted"][length] <= int(length)
    assert page.read_text().count("\n| `") == len(lines)


@pytest.mark.parametrize("command", ["kvquant --bits 2", "rotatekv"])
def test_tables_of_the_demo_model_are_refused_by_another(tmp_path, capsys, command):
    name = command.partition(" ")[0]
    out = tmp_path / "tables.safetensors"
    words = f"{command} {DEMO} --context 200 --samples 2 --out {out}"
    assert main(words.split()) == 0
    line = f"{name}:tables={out}"
    assert line in capsys.readouterr().out
    codec = create_codec(line)
    codec.check_model(SPEC)
    other = ModelSpec(
        layers=4,
        query_heads=4,
        kv_heads=2,
        head_dim=64,
        name=str(CONFIGS / "demo-model-long"),
    )
    says = re.escape(str(out)) + ".*'model_fingerprint' is .*demo-model-long has"
    with pytest.raises(CompressionError, match=says):
        codec.check_model(other)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_tables_are_the_demo_models(name):
    file = DEMO / "calibration" / f"{name}.safetensors"
    assert file.stat().st_size < 200_000
    tables = SHIPPED[name].read(file)
    assert tables.model.fingerprint == model_fingerprint(DEMO)
    tables.check_model(SPEC)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("split-planes M --context 1", "--context must be >= 2, got 1"),
        ("split-planes M --samples 0", "--samples must be >= 1, got 0"),
        ("split-planes M --drafts 8 0", "--drafts must be >= 1, got 0"),
        ("split-planes M --exponent-bits 8", "--exponent-bits must be 1 to 7, got 8"),
        ("split-planes M --exponent-bits 7 --mantissa-bits 1", "no pair fits a byte"),
        ("split-planes M --link-gbps 0", "--link-gbps must be > 0, got 0"),
        ("split-planes M --memory-gbps nan", "--memory-gbps must be > 0, got nan"),
        ("split-planes M --compare lzma", "unknown codec 'lzma'"),
        ("split-planes M --compare kvquant:tables=none", "none: cannot be read"),
        ("split-planes M --markdown no/such.md", "--markdown no/such.md: not a file"),
        ("split-planes no-such-model/a/b", "MODEL no-such-model/a/b: cannot be loaded"),
        ("split-planes D --text no.txt", "--text no.txt: cannot be read"),
        ("split-planes D --context 20", "--context: 20 tokens cannot hold 1 records"),
        ("kvquant M --bits 9 --out x", "--bits must be 1 to 8, got 9"),
        ("kvquant M --outliers 1 --out x", r"--outliers must be in [0, 1), got 1"),
        ("kvquant M --out no/such", "--out no/such: not a file in a folder"),
        ("kvquant D --out D/x.safetensors", "every *.safetensors beside MODEL's"),
        ("kvquant D --sinks 500 --context 200 --out x", "--sinks 500"),
        ("rotatekv M --rotated-heads 0 --out x", "--rotated-heads must be >= 1, got 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    words = [re.sub("^D", str(DEMO), word) for word in words.split()]
    assert main(words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert says in error
    assert list(tmp_path.iterdir()) == []


class Words:
    """A tokenizer: words are tokens, a prompt begins with token 1."""

    bos_token_id = 1

    def encode(self, text, add_special_tokens=True):
        ids = [10 + len(word) for word in text.split()]
        return [1] * add_special_tokens + ids


def cut(tmp_path, texts, **given):
    files = []
    for number, text in enumerate(texts):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_text(text)
    return prompts(Words(), tmp_path, files, seed=0, **given)


def test_long_texts_are_cut_and_short_ones_kept(tmp_path):
    long, short = " ".join(["w" * n for n in range(1, 11)]), "a bb"
    found = cut(tmp_path, [long, short], context=5, count=9)
    assert found == [[1, 11, 12, 13, 14], [1, 15, 16, 17, 18], [1, 11, 12]]
    assert cut(tmp_path, [long], context=3, count=2) == [[1, 11, 12], [1, 15, 16]]
    with pytest.raises(ConfigError, match="is empty"):
        cut(tmp_path, [" "], context=5, count=1)
    with pytest.raises(ConfigError, match="--text FILE is needed"):
        prompts(SimpleNamespace(), tmp_path, [], context=5, count=1, seed=0)


MADE = CalibratedModel(
    name="demo-model", fingerprint="0" * 12, layers=4, kv_heads=2, head_dim=64
)


def test_equal_content_is_written_as_equal_bytes(tmp_path):
    tensors = {"b": torch.arange(3), "a": torch.ones(2, 2)}
    notes = {f"note{n}": "\u00e9" * n for n in range(12)}
    digests = set()
    for number in range(8):
        shuffled = dict(sorted(notes.items(), key=lambda item: hash((item, number))))
        written = write_artifact(tmp_path / str(number), "some", tensors, shuffled)
        digests.add(written.digest)
        assert dict(written.notes) == {**notes, "format": FORMAT, "kind": "some"}
        assert torch.equal(written.tensors["b"], tensors["b"])
    assert len(digests) == 1
    with pytest.raises(CompressionError, match=r"no/where: cannot be written: No such"):
        write_artifact("no/where", "some", tensors, notes)


@pytest.mark.parametrize(
    ("notes", "says"),
    [
        ({"rotated_heads": "inf"}, "'rotated_heads' must be a number, is 'inf'"),
        ({"rotated_heads": "0"}, "metadata 'rotated_heads' must be >= 1, is 0"),
        ({"rotated_heads": "1.5"}, "'rotated_heads' must be >= 1, is 1.5"),
        ({"rotated_heads": "3"}, "'rotated_heads' is 3, which does not divide the 128"),
        ({"model_layers": "5"}, "field 'order' has 4 layers of 128 columns"),
        ({"model_head_dim": "x"}, "'model_head_dim' must be a number, is 'x'"),
    ],
)
def test_metadata_that_does_not_fit_the_fields_is_named(tmp_path, notes, says):
    order = torch.arange(128).repeat(4, 1)
    path = tmp_path / "order.safetensors"
    metadata = {"format": FORMAT, "kind": RotateKVTables.KIND, "rotated_heads": "2"}
    save_file({"order": order}, path, {**metadata, **MADE.notes, **notes})
    with pytest.raises(CompressionError, match=re.escape(says)) as caught:
        RotateKVTables.read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": 2}, "'model_layers' is 4, m has 2"),
        ({"kv_heads": 1, "head_dim": 128}, "'model_kv_heads' is 2, m has 1"),
        ({"head_dim": 32}, "'model_head_dim' is 64, m has 32"),
    ],
)
@pytest.mark.parametrize("told", [True, False])
def test_another_shape_is_refused_with_or_without_a_named_model(
    tmp_path, change, says, told
):
    path = tmp_path / "order.safetensors"
    notes = {"rotated_heads": "2", **(MADE.notes if told else {})}
    tensors = {"order": torch.arange(128).repeat(4, 1)}
    write_artifact(path, RotateKVTables.KIND, tensors, notes)
    assert (read_artifact(path, RotateKVTables.KIND).model is not None) == told
    tables = RotateKVTables.read(path)
    sizes = {"layers": 4, "query_heads": 4, "kv_heads": 2, "head_dim": 64, "name": "m"}
    tables.check_model(ModelSpec(**sizes))
    wanted = ModelSpec(**{**sizes, **change})
    if not told and wanted.kv_heads * wanted.head_dim == 128 and wanted.layers == 4:
        tables.check_model(wanted)  # nothing in the file could tell
        return
    with pytest.raises(CompressionError) as caught:
        tables.check_model(wanted)
    assert str(path) in str(caught.value)
    if told:
        assert says in str(caught.value)
