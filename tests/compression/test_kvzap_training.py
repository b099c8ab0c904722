"""KVzap's training: targets against float64, the fits, and the weights we ship."""

import json
import math
import random
from pathlib import Path

import pytest
import torch

import train_kvzap
from demo_model import tokenizer as demo_tokenizer
from kvzap import fit, targets, texts
from vericache_sglang.compression.base import ModelSpec, Step
from vericache_sglang.compression.kvzap import KVzap
from vericache_sglang.compression.kvzap_weights import read_weights
from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops

DEMO = Path(__file__).parents[2] / "configs" / "demo-model"
INPUTS, HEADS, DIM = 24, 2, 8
DEMO_SPEC = ModelSpec(
    layers=4, query_heads=4, kv_heads=2, head_dim=64, hidden_size=128, name="demo"
)


@pytest.fixture(scope="module")
def transformers():
    """Import transformers where torchvision is built for another torch."""
    define_missing_ops()
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tiny(transformers):
    """Return a random Llama of two layers whose attention is peaky."""
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=INPUTS,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=DIM,
        attn_implementation="eager",
    )
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10)
    return model


@pytest.fixture(scope="module")
def demo(transformers):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        DEMO, dtype=torch.float32, attn_implementation="eager"
    )
    return model, transformers.AutoTokenizer.from_pretrained(DEMO)


def turned(vector, position, theta=10000.0):
    """Rotate one key or query, a list, pair by pair."""
    half = len(vector) // 2
    result = list(vector)
    for i in range(half):
        angle = position * theta ** (-i / half)
        a, b = vector[i], vector[i + half]
        result[i] = a * math.cos(angle) - b * math.sin(angle)
        result[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return result


@torch.no_grad()
def oracle(model, layer, stream, repeated):
    """Walk readers and tokens one by one in float64; ``stream`` enters the layer."""
    text, again = repeated.text, repeated.again
    block = model.model.layers[layer]
    eps = model.config.rms_norm_eps
    norm = block.input_layernorm.weight.double()
    inputs = stream / (stream.square().mean(1, keepdim=True) + eps).sqrt() * norm
    attention = block.self_attn
    queries, keys, values = (
        (inputs @ part.weight.double().t()).view(len(inputs), -1, DIM)
        for part in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    output = attention.o_proj.weight.double()
    best = [[-math.inf] * HEADS for _ in text]
    for head in range(4):
        mine = head // 2
        rotated = [turned(k, at) for at, k in enumerate(keys[:, mine].tolist())]
        weighed = values[:, mine] @ output[:, head * DIM : (head + 1) * DIM].t()
        for j in again:
            query = turned(queries[j, head].tolist(), j)
            logits = [
                math.fsum(a * b for a, b in zip(query, key, strict=True)) / DIM**0.5
                for key in rotated[: j + 1]
            ]
            top = max(logits)
            whole = math.log(math.fsum(math.exp(x - top) for x in logits)) + top
            for row, t in enumerate(text):
                read = weighed[t].norm() / inputs[j].norm()
                score = logits[t] - whole + math.log(read)
                best[row][mine] = max(best[row][mine], score)
    return inputs[text.start : text.stop], best


def test_targets_equal_the_oracle_on_a_random_model(tiny):
    ids = torch.randint(50, (21,), generator=torch.Generator().manual_seed(1))
    repeated = targets.Repeated(tuple(ids.tolist()), range(2, 10), range(12, 20))
    found = targets.collect(tiny, repeated)
    with torch.no_grad():
        streams = tiny.double().model(ids[None], output_hidden_states=True)
    try:
        for layer in range(2):
            stream = streams.hidden_states[layer][0]
            inputs, wanted = oracle(tiny, layer, stream, repeated)
            torch.testing.assert_close(
                found[layer].inputs.double(), inputs, rtol=1e-4, atol=1e-5
            )
            wanted = torch.tensor(wanted)
            assert wanted.std() > 0.3, "a flat target would hide mistakes"
            torch.testing.assert_close(
                found[layer].targets.double(), wanted.double(), rtol=1e-4, atol=1e-4
            )
    finally:
        tiny.float()


def test_collecting_leaves_no_hook_behind(tiny):
    def hooks():  # transformers has its own
        return [dict(layer.self_attn._forward_hooks) for layer in tiny.model.layers]

    before = hooks()
    targets.collect(tiny, targets.Repeated((1, 2, 3, 4), range(1, 2), range(3, 4)))
    assert hooks() == before


def test_a_reading_of_zero_is_the_floor():
    attention = torch.tensor([[[0.0, 1.0]]])
    log = targets.log_plus(
        attention, torch.ones(2, 4), torch.ones(3, 4), torch.ones(1, 3)
    )
    # ||W_O v|| is 4 * sqrt(3), the reader's input sqrt(3) long.
    torch.testing.assert_close(log, torch.tensor([[targets.FLOOR], [math.log(4)]]))


@pytest.mark.parametrize("role", ["user", "system"])
def test_both_places_of_a_text_are_found(demo, role):
    _, tokenizer = demo
    text = "user 0686|name=Maya Quin|city=Kyoto\nnote: nothing."
    repeated = targets.repeat(tokenizer, text + "\n", role)
    for place in (repeated.text, repeated.again):
        assert tokenizer.decode(repeated.ids[place.start : place.stop]) == text
    whole = tokenizer.decode(repeated.ids)
    between = {"user": f"\n\n{targets.INSTRUCTION}<|end|>\n<|assistant|>"}
    between["system"] = f"<|end|>\n<|user|>{targets.INSTRUCTION}<|end|>\n<|assistant|>"
    assert whole == f"<s><|{role}|>{text}{between[role]}{text}<|end|>\n"


def test_a_tokenizer_without_a_template_and_a_text_that_repeats_itself(
    demo, transformers
):
    bare = transformers.AutoTokenizer.from_pretrained(DEMO)
    bare.chat_template = None
    repeated = targets.repeat(bare, "aa aa", "user")
    for place in (repeated.text, repeated.again):
        assert bare.decode(repeated.ids[place.start : place.stop]) == "aa aa"
    assert repeated.text.stop <= repeated.again.start


def test_a_template_that_changes_the_text_is_refused(transformers):
    changing = transformers.AutoTokenizer.from_pretrained(DEMO)
    changing.chat_template = "{{ messages[0]['content'] | upper }}"
    with pytest.raises(ValueError, match="does not leave the text as it is, twice"):
        targets.repeat(changing, "a text", "user")


def test_documents_have_the_length_that_is_wanted_and_a_seed(demo):
    built = demo_tokenizer.load(DEMO)
    one, two = texts.documents(demo[1], 2, seed=5)
    assert [one, two] == list(texts.documents(demo[1], 2, seed=5))
    assert one != two
    assert one not in list(texts.documents(demo[1], 2, seed=6))
    for text in (one, two):
        assert 600 < len(demo_tokenizer.encode(built, text)) <= texts.LENGTHS[1]


def test_a_file_is_cut_into_pieces(demo, tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("user 1234 " * 500)  # six tokens each
    pieces = texts.pieces(demo[1], file)
    ids = demo[1].encode(file.read_text(), add_special_tokens=False)
    assert len(pieces) == len(ids) // 1000
    assert file.read_text().startswith("".join(pieces))
    file.write_text("user 1234 " * 200)
    with pytest.raises(ValueError, match=r"words.txt: .* less than two pieces of 1000"):
        texts.pieces(demo[1], file)


def test_the_ridge_regression_is_the_least_squares_of_the_extended_system():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 30, 5, generator=generator) + 3
    wanted = torch.randn(2, 30, 2, generator=generator) - 4
    for alpha in (1.0, 50.0):
        found = fit.fit_linear(inputs, wanted, alpha)
        for scorer, x, y in zip(found, inputs.double(), wanted.double(), strict=True):
            ones = torch.cat([x, torch.ones(30, 1)], 1)  # the intercept, not punished
            pull = math.sqrt(alpha) * torch.eye(6).double()[:5]
            extended = torch.cat([ones, pull])
            zeros = torch.zeros(5, 2, dtype=torch.float64)
            solved = torch.linalg.lstsq(extended, torch.cat([y, zeros])).solution
            torch.testing.assert_close(scorer.final.weight.double(), solved[:5].t())
            torch.testing.assert_close(scorer.final.bias.double(), solved[5])


def test_an_mlp_learns_what_a_line_cannot():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 2000, 3, generator=generator)
    wanted = torch.stack([inputs[..., 0].abs(), inputs[..., 1:].prod(2)], 2)
    pairs = zip(inputs[:, :400], wanted[:, :400], strict=True)
    held_out = [[targets.Layer(*pair) for pair in pairs]]
    shown = inputs[:, 400:], wanted[:, 400:]
    line = fit.quality(fit.fit_linear(*shown), held_out)
    schedule = fit.Schedule(epochs=15, batch=32)
    curves = fit.fit_mlp(*shown, 16, schedule, torch.Generator().manual_seed(1))
    for straight, curved in zip(line, fit.quality(curves, held_out), strict=True):
        assert straight.r2 < 0.1
        assert curved.r2 > 0.9
        assert curved.spearman > 0.9


def test_rank_correlation_equals_a_count_of_pairs():
    """Spearman's from the squared differences of ranks that loops assign."""
    rng = random.Random(0)
    a, b = ([rng.random() for _ in range(20)] for _ in range(2))
    ranks = [[sum(y < x for y in values) for x in values] for values in (a, b)]
    apart = sum((x - y) ** 2 for x, y in zip(*ranks, strict=True))
    found = fit.spearman(torch.tensor(a), torch.tensor(b))
    assert float(found) == pytest.approx(1 - 6 * apart / (20 * (20**2 - 1)))


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_the_command_writes_the_same_weights_every_time(
    transformers, tmp_path, capsys, monkeypatch, kind
):
    monkeypatch.setattr(texts, "LENGTHS", (200, 300))
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        line = f"{DEMO} --kind {kind} --out {folder} --count 2 --held-out 1 --width 8"
        train_kvzap.main([*line.split(), "--tokens", "150"])
    one, two = ((f / "model.safetensors").read_bytes() for f in folders)
    assert one == two
    weights = read_weights(folders[0])
    assert (weights.input_dim, weights.output_dim, len(weights.layers)) == (128, 2, 4)
    assert weights.layers[0].width == (None if kind == "linear" else 8)
    training = json.loads((folders[0] / "config.json").read_text())["training"]
    assert (training["base_model"], training["trained_on"]) == ("demo-model", 1)
    assert capsys.readouterr().out.count("\n| ") == 2 * 4 + 1


def test_no_text_to_train_on_is_refused(tmp_path, capsys):
    line = f"{DEMO} --kind mlp --out {tmp_path} --count 2 --held-out 2"
    with pytest.raises(SystemExit):
        train_kvzap.main(line.split())
    assert "--held-out must be at least 1 and below --count" in capsys.readouterr().err


# Measured on ten such documents: linear 0.70 0.82 0.70 0.71, MLP 0.70 0.83 0.82 0.82.
@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("kvzap-linear", [0.60, 0.72, 0.60, 0.62]),
        ("kvzap-mlp", [0.60, 0.72, 0.72, 0.72]),
    ],
)
def test_the_shipped_weights_rank_an_unseen_document_as_kvzip_plus(
    demo, unseen, make_services, name, least
):
    selector = KVzap(weights=str(DEMO / name))
    selector.bind(make_services(DEMO_SPEC))
    for index, layer in enumerate(unseen):
        step = Step(rid="r", layer=index, start=0, hidden=layer.inputs)
        scores = selector.update(step)
        found = fit.spearman(scores, layer.targets.t()).mean()
        assert found > least[index], (index, found)


@pytest.fixture(scope="module")
def unseen(demo):
    """Return the layers of a document that no training saw."""
    model, tokenizer = demo
    (text,) = texts.documents(tokenizer, 1, seed=77)
    return targets.collect(model, targets.repeat(tokenizer, text, "system"))
