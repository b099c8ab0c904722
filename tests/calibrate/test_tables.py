"""Calibration rows and files, against the model's own projections."""

import json

import pytest
import torch
from torch.nn import functional
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from vericache_sglang.calibrate.subject import Subject
from vericache_sglang.calibrate.tables import Sampling, collect, kvquant, rotatekv
from vericache_sglang.compression.codecs.catalog import create_codec
from vericache_sglang.compression.codecs.kvquant_tables import KVQuantTables
from vericache_sglang.compression.codecs.rotatekv_tables import RotateKVTables
from vericache_sglang.errors import CompressionError, UnsupportedError


def projected(net, prompt):
    """Return outputs and gradients of k_proj and v_proj, layer by layer."""
    seen, hooks = [], []
    for layer in net.model.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):

            def keep(module, inputs, output):
                output.retain_grad()
                seen.append(output)

            hooks.append(projection.register_forward_hook(keep))
    ids = torch.tensor([prompt])
    given = net.model.embed_tokens(ids).detach().requires_grad_()
    logits = net(inputs_embeds=given).logits[0]
    functional.cross_entropy(logits[:-1], ids[0, 1:]).backward()
    for hook in hooks:
        hook.remove()
    pairs = [(out[0].detach(), out.grad[0].square()) for out in seen]
    return list(zip(pairs[::2], pairs[1::2], strict=True))


def rows_of(rows):
    return {tuple(row) for row in (rows * 1e4).round().int().tolist()}


def test_rows_are_what_the_projections_give_with_their_gradients(tiny, prompt):
    sampling = Sampling(rows=1000, sinks=3, gradients=True)
    found = collect(tiny, [prompt], sampling)
    for layer, (keys, values) in zip(found, projected(tiny.net, prompt), strict=True):
        # Rows come in the order of a draw; values, never rotated, tell which is which.
        distance = torch.cdist(layer.values, values[0])
        place = distance.argmin(1)
        assert sorted(place.tolist()) == list(range(3, len(prompt)))
        torch.testing.assert_close(layer.values, values[0][place], rtol=0, atol=1e-5)
        torch.testing.assert_close(layer.keys, keys[0][place], rtol=0, atol=1e-5)
        for got, wanted in (
            (layer.key_weights, keys[1]),
            (layer.value_weights, values[1]),
        ):
            scale = wanted.max()
            torch.testing.assert_close(
                got / scale, wanted[place] / scale, rtol=1e-3, atol=1e-5
            )


def test_every_prompt_gives_the_same_share_of_the_rows(tiny, prompt):
    found = collect(tiny, [prompt, prompt[::-1]], Sampling(rows=20, sinks=2))
    assert [len(layer.keys) for layer in found] == [20, 20]
    assert (found[0].key_weights == 1).all()
    again = collect(tiny, [prompt, prompt[::-1]], Sampling(rows=20, sinks=2))
    assert torch.equal(found[1].values, again[1].values)
    other = collect(tiny, [prompt, prompt[::-1]], Sampling(rows=20, sinks=2, seed=9))
    assert not torch.equal(found[1].values, other[1].values)


def test_massive_tokens_are_left_out_layer_by_layer(tiny, prompt):
    everything = collect(tiny, [prompt], Sampling(rows=1000))
    found = collect(tiny, [prompt], Sampling(rows=1000, massive=True))
    with torch.no_grad():
        hidden = tiny.net(torch.tensor([prompt]), output_hidden_states=True)
    for index, layer in enumerate(found):
        entering = hidden.hidden_states[index][0].abs()
        largest = sorted(entering.flatten().tolist())[-20:]
        massive = {t for t, row in enumerate(entering) if row.max() >= largest[0]}
        assert 0 < len(massive) < len(prompt)
        assert len(layer.keys) == len(prompt) - len(massive)
        assert rows_of(layer.values) < rows_of(everything[index].values)


def test_kvquant_files_are_read_by_the_codec_and_equal_each_other(
    tiny, prompt, tmp_path
):
    file, sampling = tmp_path / "a.safetensors", Sampling(rows=500, gradients=True)
    made = kvquant(tiny, [prompt], file, sampling, bits=3, outliers=0.02)
    assert (made.bits, made.columns, made.outliers) == (3, 32, 0.02)
    assert made.model == tiny.model()
    again = kvquant(tiny, [prompt], tmp_path / "b", sampling, bits=3, outliers=0.02)
    assert (tmp_path / "b").read_bytes() == file.read_bytes()
    assert again.digest == made.digest
    codec = create_codec(f"kvquant:tables={file},sinks=0").bind(tiny.rope())
    codec.check_model(tiny.spec())
    keys = torch.randn(2, 9, 16)
    near, _ = codec.decode(
        codec.encode(keys, keys, layer=1, positions=torch.arange(9))[0]
    )
    assert near.shape == keys.shape


@pytest.mark.parametrize(("together", "wanted"), [(None, 2), (1, 1)])
def test_rotatekv_files_say_how_many_heads_are_rotated(
    tiny, prompt, tmp_path, together, wanted
):
    file = tmp_path / "order.safetensors"
    made = rotatekv(tiny, [prompt], file, Sampling(rows=500), together)
    assert made.rotated_heads == wanted
    assert made.order.shape == (2, 32)
    assert RotateKVTables.read(file).digest == made.digest
    codec = create_codec(f"rotatekv:tables={file},group=16").bind(tiny.rope())
    codec.check_model(tiny.spec())
    with pytest.raises(CompressionError, match="2 heads cannot be rotated 3 at a time"):
        rotatekv(tiny, [prompt], file, Sampling(rows=500), 3)


def test_the_rotation_is_the_models(tiny, prompt):
    rope = tiny.rope()
    with torch.no_grad():
        cache = tiny.net(torch.tensor([prompt])).past_key_values
    (keys, _), _ = projected(tiny.net, prompt)[0]
    before = keys.view(len(prompt), 2, 16).transpose(0, 1)
    behind = rope(before, torch.arange(len(prompt)))
    torch.testing.assert_close(behind, cache.layers[0].keys[0], rtol=0, atol=1e-5)


def test_rotations_of_another_kind_are_refused(tmp_path):
    sizes = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    interleaved = CohereForCausalLM(
        CohereConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            **sizes,
        )
    )
    with pytest.raises(UnsupportedError, match="not rotated half against half"):
        Subject(interleaved.eval(), tmp_path).rope()
    learned = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, **sizes))
    with pytest.raises(UnsupportedError, match="one rotary embedding"):
        Subject(learned.eval(), tmp_path).rope()


def test_a_changed_model_has_another_fingerprint(tiny, tmp_path):
    for file in tiny.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    copy = Subject(tiny.net, tmp_path)
    assert copy.model().fingerprint == tiny.model().fingerprint
    config = json.loads((tmp_path / "config.json").read_text())
    config["transformers_version"] = "0"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert copy.model().fingerprint == tiny.model().fingerprint
    weights = tmp_path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert copy.model().fingerprint != tiny.model().fingerprint
    weights.write_bytes(content)
    config["rope_theta"] = 5.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert copy.model().fingerprint != tiny.model().fingerprint


def test_a_file_without_gradients_says_so(tiny, prompt, tmp_path):
    kvquant(tiny, [prompt], tmp_path / "a", Sampling(rows=9), bits=2, outliers=0.0)
    header = (tmp_path / "a").read_bytes()[8:2000].decode(errors="ignore")
    assert '"weights":"equal"' in header
    assert KVQuantTables.read(tmp_path / "a").bits == 2
