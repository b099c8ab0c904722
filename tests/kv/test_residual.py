"""Residual complements: every bit back, and every changed bit noticed."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.compression.budget import Budget, coded_rows, keep_indices
from vericache_sglang.compression.codecs.catalog import create_codec
from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.host_pages import HostPagePool
from vericache_sglang.kv.host_store import HostStore
from vericache_sglang.kv.plane_residual import PlaneResidual
from vericache_sglang.kv.residual import RawResidual
from vericache_sglang.kv.segment_length import SEGMENT

LAYERS, HEADS, KEY_DIM, VALUE_DIM = 2, 3, 8, 6
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
LINES = {
    "mild": "split-planes:exponent_bits=4,mantissa_bits=3,block=4",
    "harsh": "split-planes:exponent_bits=1,mantissa_bits=0,block=16",
}


@dataclass
class Prompt:
    """One prompt's KV, what of it is where, and its sealed complement."""

    budget: Budget
    keys: torch.Tensor
    values: torch.Tensor
    exact: torch.Tensor
    coded: torch.Tensor
    codec: object
    residual: object

    def gone(self, layer, head):
        """Positions the complement brings back, by a loop."""
        kept = self.exact[layer, head].tolist()
        return [i for i in range(self.budget.offered) if i not in kept]

    def drafts(self, layer):
        """The draft parts as slots give them: of no known number of escapes."""
        parts = []
        for start in range(0, self.budget.coded, SEGMENT):
            where = self.coded[layer, :, start : start + SEGMENT]
            keys, values = (
                torch.stack(
                    [entries[layer, where[h].tolist(), h] for h in range(HEADS)]
                )
                for entries in (self.keys, self.values)
            )
            part, _ = self.codec.encode(keys, values, layer=layer, positions=where)
            part_shape = type(part.part_shape)(
                heads=HEADS,
                tokens=where.shape[1],
                key_dim=KEY_DIM,
                value_dim=VALUE_DIM,
                dtype=keys.dtype,
            )
            parts.append(type(part)(part.codec, part_shape, layer, None, part.tensors))
        return parts


def geometry(dtype):
    return KVGeometry(
        layers=LAYERS,
        kv_heads=HEADS,
        head_dim=KEY_DIM,
        v_head_dim=VALUE_DIM,
        element_bytes=dtype.itemsize,
        page_size=1,
    )


def drawn(dtype, dim, tokens, generator, wild):
    """Return KV [L, T, H, D]: any bits where ``wild``, else of a model's size."""
    shape = (LAYERS, tokens, HEADS, dim)
    if not wild:
        return torch.randn(shape, generator=generator).to(dtype)
    raw = torch.randint(
        0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8
    )
    return raw.view(dtype).squeeze(-1)


def filled(budget, dtype=torch.bfloat16, line="mild", seed=0, wild=True, made=None):
    """Write a prompt of random bits, each head with a choice of its own."""
    generator = torch.Generator().manual_seed(seed)
    codec = create_codec(LINES[line])
    tokens = budget.offered
    keys = drawn(dtype, KEY_DIM, tokens, generator, wild)
    values = drawn(dtype, VALUE_DIM, tokens, generator, wild)
    exact, coded = [], []
    for _ in range(LAYERS):
        scores = torch.rand(HEADS, tokens, generator=generator)
        one, other = coded_rows(keep_indices(scores, budget), budget)
        exact.append(one)
        coded.append(other)
    exact, coded = torch.stack(exact), torch.stack(coded)
    if made is None:
        made = PlaneResidual(geometry(dtype), codec, budget, dtype)
    prompt = Prompt(budget, keys, values, exact, coded, codec, made)
    made.describe(exact, coded)
    for layer in range(LAYERS):
        gone = [prompt.gone(layer, head) for head in range(HEADS)]
        pair = (
            torch.stack([entries[layer, gone[h], h] for h in range(HEADS)], dim=1)
            for entries in (keys, values)
        )
        made.write(layer, *pair)
    return prompt


def restored(prompt):
    """Check every layer's entries against the prompt itself, token by token."""
    for layer in range(LAYERS):
        prompt.residual.verify(layer)
        found = prompt.residual.blocks(layer, prompt.drafts)
        for (entries,), whole in zip(found, (prompt.keys, prompt.values), strict=True):
            integer = BITS[whole.dtype]
            assert entries.shape == (prompt.budget.staged, HEADS, whole.shape[3])
            for head in range(HEADS):
                wanted = whole[layer, prompt.gone(layer, head), head]
                assert torch.equal(entries[:, head].view(integer), wanted.view(integer))


@st.composite
def budgets(draw):
    offered = draw(st.integers(2, 60))
    kept = draw(st.integers(1, offered))
    sinks = draw(st.integers(0, min(3, kept)))
    recent = draw(st.integers(0, min(4, kept - sinks)))
    coded = draw(st.integers(0, (kept - sinks - recent) // 4)) * 4
    return Budget(offered, kept, sinks, recent, coded, coded)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("dtype", BITS)
@given(budgets(), st.integers(0, 100), st.booleans())
@settings(deadline=None, max_examples=30)
def test_every_bit_comes_back(dtype, line, budget, seed, wild):
    restored(filled(budget, dtype, line, seed, wild))


@pytest.mark.parametrize(
    "budget",
    [
        Budget(10, 10, 1, 1, 8, 5),  # nothing dropped
        Budget(10, 3, 1, 1, 0, 0),  # nothing packed
        Budget(10, 1, 1, 0, 0, 0),
        Budget(8, 8, 0, 0, 8, 4),  # nothing exact
        Budget(9, 4, 0, 0, 4, 2),  # nothing exact, some dropped
    ],
)
def test_borders_come_back_too(budget):
    restored(filled(budget))


def test_long_prompts_are_packed_segment_by_segment():
    prompt = filled(Budget(2 * SEGMENT + 60, 2 * SEGMENT + 20, 4, 8, 2 * SEGMENT + 8))
    restored(prompt)
    assert len(prompt.drafts(0)) == 3


def test_fewer_drafts_than_residuals_are_an_error():
    prompt = filled(Budget(20, 20, 0, 0, 20, 5))
    with pytest.raises(InvariantError, match="0 drafts, 1 residuals"):
        prompt.residual.blocks(0, None)


def covered(residual, layer):
    """Every tensor a checksum is to cover, by name."""
    fields = {"region": residual._region(layer)}
    for name in ("kept", "coded", "escapes"):
        fields[name] = getattr(residual, name)[layer]
    return {name: tensor for name, tensor in fields.items() if tensor.numel()}


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_one_flipped_bit_in_any_tensor_is_noticed_in_its_layer(dtype, layer):
    prompt = filled(Budget(SEGMENT + 60, SEGMENT + 40, 2, 2, SEGMENT + 16), dtype)
    made, other = prompt.residual, 1 - layer
    fields = covered(made, layer)
    assert fields.keys() == {"region", "kept", "coded", "escapes"}
    for tensor in fields.values():
        raw = tensor.view(torch.uint8).view(-1)
        for byte in (0, raw.numel() // 2, raw.numel() - 1):
            raw[byte] ^= 16
            made.verify(other)
            with pytest.raises(TransferError, match=f"differs in layer {layer}"):
                made.verify(layer)
            raw[byte] ^= 16
    made.verify(layer)


def test_a_layer_is_trusted_only_once_it_is_written():
    made = PlaneResidual(
        geometry(torch.bfloat16),
        create_codec(LINES["mild"]),
        Budget(9, 4, 0, 0, 4, 2),
        torch.bfloat16,
    )
    assert not made.sealed
    with pytest.raises(TransferError, match="residual KV checksum differs in layer 1"):
        made.verify(1)
    assert filled(Budget(9, 4, 0, 0, 4, 2)).residual.sealed


@pytest.mark.parametrize("wild", [True, False])
def test_its_bytes_are_those_of_its_tensors(wild):
    prompt = filled(Budget(60, 40, 2, 2, 32, 16), wild=wild)
    made = prompt.residual
    held = [
        tensor.nbytes
        for layer in range(LAYERS)
        for tensor in covered(made, layer).values()
    ]
    assert made.nbytes == sum(held)
    assert made.slots == 60 - 8, "packed ones and dropped ones"
    travels = sum(covered(made, layer)["region"].nbytes for layer in range(LAYERS))
    assert made.nbytes_layer == travels // LAYERS
    raw = made.slots * geometry(torch.bfloat16).token_bytes
    assert travels < raw, "a residual is smaller than the entries"


def test_entries_of_a_model_s_size_need_a_quarter_of_their_bytes():
    """Of 16 bits 4 are mantissa that stayed behind; escaped exponents are few."""
    prompt = filled(Budget(64, 64, 0, 0, 64, 32), wild=False)
    residual = covered(prompt.residual, 0)["region"].nbytes
    share = residual * LAYERS / (64 * geometry(torch.bfloat16).token_bytes)
    assert 4 / 16 <= share < 0.3


def test_it_is_never_shared():
    one, same = (filled(Budget(20, 12, 1, 1, 8, 4)).residual for _ in range(2))
    assert one.checksums == same.checksums
    assert not one.equals(same)
    raw = RawResidual(geometry(torch.bfloat16), 16, 4, torch.bfloat16)
    assert not one.equals(raw)
    assert not raw.equals(one)


def test_the_store_counts_what_is_held_once_it_is_settled():
    budget, dtype = Budget(60, 40, 2, 2, 32, 16), torch.bfloat16
    page_pool = HostPagePool(10**6, 64, pinned=False)
    store = HostStore(geometry(dtype), dtype, page_pool, create_codec(LINES["mild"]))
    most = store.residual_bytes(budget)
    made = store.open("a", budget)
    assert isinstance(made, PlaneResidual)
    assert store.used_bytes == most
    first = filled(budget, wild=False, made=made)
    store.settle("a")
    tensors = [*covered(made, 0).values(), *covered(made, 1).values()]
    assert store.used_bytes == made.held_bytes < most
    # Positions of both layers are one tensor; every tensor begins a page of 64 bytes.
    places = [made.kept, made.coded, made.escapes]
    rest = [t for t in tensors if t.dtype != torch.int32]
    pages = sum(-(-tensor.nbytes // 64) for tensor in (*places, *rest))
    assert made.held_bytes == 64 * pages
    store.check({"a"})
    held = made.held_bytes
    store.settle("a")
    assert store.used_bytes == held, "settling twice counts once"
    restored(first)
    assert page_pool.take(page_pool.free_bytes - most), "what it did not need is free"
    other = store.open("b", budget)
    second = filled(budget, wild=False, made=other)
    store.settle("b")
    assert store.share("b") == store.group_of("b") != store.group_of("a")
    restored(second)
    assert store.drop("a") == made.held_bytes
    assert store.drop("b") == other.held_bytes


def test_residuals_whose_pages_lie_apart_come_back_too():
    page_pool = HostPagePool(64 * 2000, 64, pinned=False)
    for each in [page_pool.take(1) for _ in range(2000)][::2]:
        each.free()
    budget, dtype = Budget(60, 40, 2, 2, 32, 16), torch.bfloat16
    codec = create_codec(LINES["mild"])
    made = PlaneResidual(geometry(dtype), codec, budget, dtype, page_pool)
    prompt = filled(budget, made=made)
    made.settle()
    restored(prompt)
    assert made.checksums == filled(budget).residual.checksums
    made.free()
    assert page_pool.free_bytes == 64 * 1000
    page_pool.check()


def test_a_codec_that_approximates_leaves_the_entries_themselves():
    dtype = torch.bfloat16
    page_pool = HostPagePool(10**6, 64, pinned=False)
    codec = create_codec("turboquant:bits=3")
    store = HostStore(geometry(dtype), dtype, page_pool, codec)
    budget = Budget(20, 12, 1, 1, 8, 4)
    made = store.open("a", budget)
    assert isinstance(made, RawResidual)
    assert made.held_bytes == store.residual_bytes(budget)
