"""Calibration files: read back as written; anything else is refused by name."""

import re

import pytest
import torch
from safetensors.torch import save_file

from vericache_sglang.compression.codecs.artifact import (
    FORMAT,
    read_artifact,
    write_artifact,
)
from vericache_sglang.compression.codecs.kvquant_tables import KVQuantTables
from vericache_sglang.compression.codecs.rotatekv_tables import RotateKVTables
from vericache_sglang.errors import CompressionError

KVQUANT = {"format": FORMAT, "kind": KVQuantTables.KIND, "outliers": "0.01"}
ROTATEKV = {"format": FORMAT, "kind": RotateKVTables.KIND, "rotated_heads": "4"}


def kvquant_fields():
    books = torch.tensor([[-0.5, 0.1, 0.2, 0.9]]).repeat(2, 1)
    return {
        "key_low": torch.full((2, 8), -1.0),
        "key_high": torch.full((2, 8), 1.0),
        "key_books": books,
        "value_books": books.clone(),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_what_was_written_is_read(tmp_path, dtype):
    tensor = torch.arange(12).view(3, 4).to(dtype)
    path = tmp_path / "some.safetensors"
    written = write_artifact(path, "some", {"t": tensor.t()}, {"note": "1.5"})
    found = read_artifact(path, "some")
    assert torch.equal(found.tensor("t", dtype, (4, None)), tensor.t())
    assert found.note("note") == 1.5
    assert found.digest == written.digest
    assert list(tmp_path.iterdir()) == [path]
    other = write_artifact(path, "some", {"t": tensor + 1}, {"note": "1.5"})
    assert other.digest != found.digest


def refused(path, says, read=KVQuantTables.read):
    """Expect an error that names the file and says ``says``."""
    with pytest.raises(CompressionError, match=re.escape(str(path)) + ".*" + says):
        read(path)


@pytest.mark.parametrize("part", [0.99, 0.5, 0.01])
def test_a_truncated_file_is_refused(tmp_path, part):
    path = tmp_path / "cut.safetensors"
    save_file(kvquant_fields(), path, KVQUANT)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    refused(path, "truncated or not a safetensors file")


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "foreign"
    refused(path, "cannot be read: No such file")
    path.write_bytes(b"")
    refused(path, "truncated or not a safetensors file")
    path.write_text("layers: 2\n" * 100)
    refused(path, "truncated or not a safetensors file")
    save_file(kvquant_fields(), path)
    refused(path, "metadata 'format' is 'missing'")
    save_file(kvquant_fields(), path, {**KVQUANT, "kind": RotateKVTables.KIND})
    refused(path, "metadata 'kind' is 'rotatekv-tables', not 'kvquant-tables'")
    refused(path, "field 'order' is missing", RotateKVTables.read)


@pytest.mark.parametrize(
    ("field", "tensor", "says"),
    [
        ("key_low", None, "field 'key_low' is missing; the file has"),
        (
            "key_low",
            torch.zeros(8),
            r"'key_low' must be torch.float32 \['any', 'any'\]",
        ),
        (
            "key_high",
            torch.ones(2, 7),
            r"'key_high' must be .* \[2, 8\], is .* \[2, 7\]",
        ),
        ("key_high", torch.ones(2, 8).half(), "'key_high' must be torch.float32"),
        ("key_high", torch.full((2, 8), torch.nan), "'key_high' holds NaN"),
        ("key_high", torch.full((2, 8), -2.0), "'key_low' is above 'key_high'"),
        ("key_books", torch.zeros(2, 3), "'key_books' must have 2 to 256 entries"),
        ("value_books", torch.zeros(2, 8), r"'value_books' must be .* \[2, 4\]"),
    ],
)
def test_wrong_fields_of_kvquant_are_named(tmp_path, field, tensor, says):
    path = tmp_path / "tables.safetensors"
    fields = kvquant_fields()
    if field == "key_books":
        fields["value_books"] = tensor.clone()
    fields[field] = tensor
    save_file({k: t for k, t in fields.items() if t is not None}, path, KVQUANT)
    refused(path, says)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"outliers": "many"}, "metadata 'outliers' must be a number, is 'many'"),
        ({"outliers": "1.5"}, r"metadata 'outliers' must be in \[0, 1\), is 1.5"),
    ],
)
def test_wrong_metadata_is_named(tmp_path, metadata, says):
    path = tmp_path / "tables.safetensors"
    save_file(kvquant_fields(), path, {**KVQUANT, **metadata})
    refused(path, says)
    save_file(kvquant_fields(), path, {k: KVQUANT[k] for k in ("format", "kind")})
    refused(path, "metadata 'outliers' must be a number, is 'missing'")


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (torch.zeros(2, 8, dtype=torch.int64), "'order' is not a permutation"),
        (torch.arange(1, 9)[None], "'order' is not a permutation"),
        (torch.arange(8), "'order' must be torch.int64"),
        (torch.arange(8)[None].int(), "'order' must be torch.int64"),
    ],
)
def test_wrong_orders_of_rotatekv_are_named(tmp_path, order, says):
    path = tmp_path / "order.safetensors"
    save_file({"order": order}, path, ROTATEKV)
    refused(path, says, RotateKVTables.read)
