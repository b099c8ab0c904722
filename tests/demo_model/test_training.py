"""The optimizer's maths, and the training command from end to end in seconds."""

import json

import pytest
import torch

from demo_model import checkpoint, draft, evaluate, train
from demo_model.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 32), (2, 32, 8)])
def test_updates_are_nearly_orthogonal(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(matrices))
    assert values.max() < 1.4
    assert values.median() > 0.6


def test_a_step_moves_against_the_gradient_whatever_its_size():
    moved = []
    for size in (1e-3, 1e3):
        weight = torch.nn.Parameter(torch.zeros(4, 4))
        weight.grad = size * torch.eye(4)
        Muon([weight], lr=0.1, weight_decay=0.0).step()
        moved.append(weight.detach().clone())
    assert torch.allclose(moved[0], moved[1], atol=1e-3)
    assert (moved[0].diagonal() < -0.05).all()


def test_answers_are_found_where_they_are_complete():
    row = torch.tensor([9, 5, 7, 7, 6, 9, 5, 7, 7])
    answered = torch.tensor([0, 1, 1, 1, 0, 0, 1, 1], dtype=torch.bool)
    assert train.spans(row, answered, end=6) == [(1, 4)]


@pytest.mark.extended
@pytest.mark.parametrize(
    "source",
    [
        pytest.param([], id="new"),
        pytest.param(["--continue-from"], id="continued"),
    ],
)
def test_the_command_trains_and_exports(source, tmp_path, capsys, request):
    if source:
        source = [*source, str(request.config.rootpath / "configs" / "demo-model")]
    out = tmp_path / "model"
    train.main(["--out", str(out), "--minutes", "0.02", "--cooldown", "0.01", *source])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["steps"] >= 1
    assert summary["tokens"] > 0
    assert checkpoint.load(out).config.vocab_size == 586
    assert json.loads((out / "config.json").read_text())["rope_theta"] == 1e8


def test_the_evaluation_writes_its_table_and_its_circumstances(
    tmp_path, capsys, request
):
    folder = str(request.config.rootpath / "configs" / "demo-model")
    file = tmp_path / "results" / "table.json"
    argv = [folder, "--contexts", "600", "--documents", "2", "--requests", "2"]
    evaluate.main([*argv, "--json", str(file)])
    content = json.loads(file.read_text())
    single, multi = content["results"]
    assert (single["requests"], multi["requests"]) == (4, 4)
    assert single["exact"] >= 0.75
    assert 5 * 4 <= multi["calls"] <= 8 * 4
    assert {"argv", "date", "versions"} <= set(content)
    assert capsys.readouterr().out.startswith("| context | kind |")


@pytest.mark.extended
def test_the_small_model_is_trained_on_what_a_ring_shows(tmp_path, capsys):
    out = tmp_path / "draft"
    draft.main(["--out", str(out), "--minutes", "0.01"])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["steps"] >= 1
    assert 90_000 < summary["parameters"] < 130_000
    assert 0 <= summary["right"] <= 1
    assert checkpoint.load(out).config.vocab_size == 586
