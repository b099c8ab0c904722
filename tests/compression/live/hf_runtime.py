"""Selectors, driven as the engine drives them, over a model of transformers."""

import copy
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from vericache_sglang.compression.base import (
    ModelSpec,
    ProbeLayer,
    QueryTail,
    Seen,
    Step,
)
from vericache_sglang.compression.codecs.rope import Rope

TOKENS = 300
RID = "live"


@dataclass(frozen=True)
class LayerRun:
    """What one layer computed for the n tokens of a forward, T with the cached ones.

    Attributes:
        hidden: [n, d] attention inputs.
        queries: [Hq, n, D] post-RoPE.
        keys: [H, T, D] post-RoPE.
        values: [H, T, D].
        embeddings: Cosine and sine of the n positions, as the model made them.
    """

    hidden: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    embeddings: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Prompt:
    """A prompt that was run, and the model that ran it."""

    model: torch.nn.Module
    ids: torch.Tensor
    cache: object
    layers: list[LayerRun]

    def attention(self, layer):
        """Return the attention module of one layer, as the presses want it."""
        module = self.model.model.layers[layer].self_attn
        module.rotary_emb = self.model.model.rotary_emb
        return module


@torch.inference_mode()
def prefill(model, tokens):
    """Run a random prompt and keep what its layers saw."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 256, (tokens,), generator=generator)
    cache = empty_cache(model)
    return Prompt(model, ids, cache, forward(model, ids, cache))


def empty_cache(model):
    """Return a cache of transformers for one request."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


@torch.inference_mode()
def attention_weights(prompt):
    """Return every layer's attention [Hq, T, T]; only the eager kernel gives it."""
    model = prompt.model
    model.set_attn_implementation("eager")
    try:
        given = model(input_ids=prompt.ids[None], output_attentions=True)
    finally:
        model.set_attn_implementation("sdpa")
    return [layer[0] for layer in given.attentions]


def forward(model, ids, cache):
    """Run ``ids`` behind ``cache``, which grows; return a ``LayerRun`` per layer."""
    before = cache.get_seq_length()
    inputs, queries = [], []
    with ExitStack() as hooks:
        for layer in model.model.layers:
            part = layer.self_attn
            # The last thing done to a query before RoPE.
            source = part.q_norm if hasattr(part, "q_norm") else part.q_proj
            for handle in (
                source.register_forward_hook(lambda *args: queries.append(args[2])),
                part.register_forward_hook(
                    lambda module, args, kwargs, output: inputs.append(kwargs),
                    with_kwargs=True,
                ),
            ):
                hooks.callback(handle.remove)
        model.model(
            input_ids=ids[None],
            past_key_values=cache,
            position_ids=torch.arange(before, before + len(ids))[None],
        )
    dim = model.config.head_dim
    runs = []
    for layer, seen, query in zip(cache.layers, inputs, queries, strict=True):
        rows = query.view(len(ids), -1, dim).transpose(0, 1)
        cosine, sine = seen["position_embeddings"]
        left, right = rows.split(dim // 2, dim=2)
        turned = torch.cat([-right, left], dim=2)
        runs.append(
            LayerRun(
                seen["hidden_states"][0],
                rows * cosine + turned * sine,
                layer.keys[0],
                layer.values[0],
                (cosine, sine),
            )
        )
    return runs


class HfServices:
    """What the engine hands to ``bind``, taken from a model of transformers."""

    def __init__(self, model):
        config, rotary = model.config, model.model.rotary_emb
        self.spec = ModelSpec(
            layers=config.num_hidden_layers,
            query_heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            name=config.name_or_path,
        )
        self.rope = Rope(rotary.inv_freq.float(), rotary.attention_scaling)
        self._model = model

    def output_weight(self, layer):
        weight = self._model.model.layers[layer].self_attn.o_proj.weight.detach()
        shape = (-1, self.spec.query_heads, self.spec.head_dim)
        return weight.view(shape).permute(1, 2, 0)

    def encode(self, text):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.spec.name)
        return tokenizer.encode(text, add_special_tokens=False)


@torch.inference_mode()
def drive(selector, prompt, *, window=None, chunk=128):
    """Give a selector what the engine would, and return its scores per layer.

    Args:
        selector: Fresh.
        prompt: What to score; every token is offered.
        window: Last queries to show, in tokens; None: as many as it wants.
        chunk: Tokens of a prefill step.
    """
    needs, total = selector.needs, len(prompt.ids)
    selector.bind(HfServices(prompt.model))
    selector.open(RID)
    noted = [_stream(selector, i, run, chunk) for i, run in enumerate(prompt.layers)]
    if needs.probes:
        _probe(selector, prompt)
    scores = []
    for index, run in enumerate(prompt.layers):
        tail = None
        if needs.q_tail:
            tail = QueryTail(run.queries[:, -(window or needs.q_tail) :], total)
        seen = Seen(tail=tail, noted=noted[index])
        scores.append(selector.scores(RID, index, run.keys, run.values, seen))
    selector.close(RID)
    return scores


def _stream(selector, index, run, chunk):
    """Show one layer's prefill chunk by chunk; return what was noted."""
    needs = selector.needs
    if not (needs.q_stream or needs.hidden):
        return None
    notes = []
    for start in range(0, len(run.hidden), chunk):
        part = slice(start, start + chunk)
        step = Step(rid=RID, layer=index, start=start)
        if needs.q_stream:
            step = replace(step, queries=run.queries[:, part])
        if needs.hidden:
            step = replace(step, hidden=run.hidden[part])
        notes.append(selector.update(step))
    return None if notes[0] is None else torch.cat(notes, dim=1)


def _probe(selector, prompt):
    """Run the selector's probes, each behind a copy of the prompt's cache."""
    total = len(prompt.ids)
    for probe in selector.probes(RID, prompt.ids.tolist()):
        runs = forward(
            prompt.model, torch.tensor(probe.tokens), copy.deepcopy(prompt.cache)
        )
        for index, run in enumerate(runs):
            layer = ProbeLayer(
                layer=index,
                queries=run.queries,
                probe_keys=run.keys[:, total:],
                keys=run.keys[:, :total],
                values=run.values[:, :total],
                hidden=run.hidden if selector.needs.hidden else None,
            )
            selector.observe(RID, probe, layer)
