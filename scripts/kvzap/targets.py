"""Training targets of KVzap: the logarithm of KVzip+, from one forward per text.

The input is a text, an instruction to repeat it, and the repetition. A token's target
is the maximum over tokens of the repetition and query heads of its KV head of:
attention times the norm of the value after the output projection, over the norm of the
reader's attention input. Attention is the full causal softmax, not the subset of
KVzip's probes (arXiv:2601.07891; kvpress, ``kvzap/data.py``).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

INSTRUCTION = "Repeat the previous context exactly."
FLOOR = -30.0
"""Lowest target: zero has no logarithm, and values near 1e-13 carry no information."""

Role = Literal["system", "user"]


@dataclass(frozen=True, slots=True)
class Repeated:
    """A conversation that repeats a text.

    Attributes:
        ids: Token ids.
        text: Where the text stands, [first, last).
        again: Where its repetition stands.
    """

    ids: tuple[int, ...]
    text: range
    again: range


@dataclass(frozen=True, slots=True)
class Layer:
    """Training examples of one layer.

    Attributes:
        inputs: [T, d] attention inputs of the text's tokens, float32.
        targets: [T, H] natural logarithm of KVzip+, float32, >= ``FLOOR``.
    """

    inputs: torch.Tensor
    targets: torch.Tensor


def repeat(tokenizer: PreTrainedTokenizerBase, text: str, role: Role) -> Repeated:
    """Write the conversation and find both places in it.

    Args:
        tokenizer: Fast, so that tokens can be traced to characters; with a chat
            template or without one.
        text: Not empty.
        role: Whose turn the text is. ``user`` has the instruction in the same turn, as
            the published training; ``system`` in a turn of its own.

    Raises:
        ValueError: The conversation does not hold the text twice, apart.
    """
    text = text.strip()
    if tokenizer.chat_template is None:
        written = f"{text}\n\n{INSTRUCTION}\n{text}\n"
    else:
        before = (
            [{"role": "user", "content": f"{text}\n\n{INSTRUCTION}"}]
            if role == "user"
            else [
                {"role": "system", "content": text},
                {"role": "user", "content": INSTRUCTION},
            ]
        )
        turns = [*before, {"role": "assistant", "content": text}]
        written = tokenizer.apply_chat_template(turns, tokenize=False)
    first, second = written.find(text), written.rfind(text)
    if first < 0 or second < first + len(text):
        raise ValueError("the chat template does not leave the text as it is, twice")
    encoded = tokenizer(
        written,
        add_special_tokens=tokenizer.chat_template is None,
        return_offsets_mapping=True,
    )
    starts = torch.tensor([start for start, _ in encoded["offset_mapping"]])

    def place(begin: int) -> range:
        inside = (starts >= begin) & (starts < begin + len(text))
        found = inside.nonzero()[:, 0]
        return range(int(found[0]), int(found[-1]) + 1)

    return Repeated(tuple(encoded["input_ids"]), place(first), place(second))


@torch.no_grad()
def collect(model: PreTrainedModel, repeated: Repeated) -> list[Layer]:
    """Run a conversation and return what its layers give, in order.

    Args:
        model: A Llama-like one (``model.layers[l].self_attn`` with ``v_proj`` and
            ``o_proj``), loaded with ``attn_implementation="eager"``: no other returns
            its attention.
        repeated: At most as long as the model's positions reach.

    Returns:
        Per layer, inputs and targets of the text's tokens.
    """
    found: list[Layer] = []
    with ExitStack() as hooks:
        for layer in model.model.layers:
            handle = layer.self_attn.register_forward_hook(
                _reader(repeated, found), with_kwargs=True
            )
            hooks.callback(handle.remove)
        ids = torch.tensor([repeated.ids], device=model.device)
        model.model(ids, use_cache=False)
    return found


def _reader(repeated: Repeated, found: list[Layer]) -> Callable[..., None]:
    """Return a hook that adds its layer to ``found``."""

    def read(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        inputs = kwargs["hidden_states"][0]
        text = slice(repeated.text.start, repeated.text.stop)
        again = slice(repeated.again.start, repeated.again.stop)
        targets = log_plus(
            output[1][0, :, again, text],
            module.v_proj(inputs[text]),
            module.o_proj.weight,
            inputs[again],
        )
        found.append(Layer(inputs[text].float().cpu(), targets.cpu()))

    return read


def log_plus(
    attention: torch.Tensor,
    values: torch.Tensor,
    output_weight: torch.Tensor,
    readers: torch.Tensor,
) -> torch.Tensor:
    """Return the targets of one layer, [T, H] float32.

    Args:
        attention: [Hq, n, T] of n readers to T tokens, in [0, 1].
        values: [T, H * D], before they are parted into heads.
        output_weight: [d, Hq * D], as ``o_proj`` holds it.
        readers: [n, d] attention inputs of the readers.
    """
    query_heads, _, tokens = attention.shape
    dim = output_weight.shape[1] // query_heads
    heads = values.shape[1] // dim
    group = query_heads // heads
    lengths = readers.float().norm(dim=1)
    # The value does not depend on the reader, so the maximum is taken without it.
    most = (attention.float() / lengths[None, :, None]).amax(1)
    scores = values.new_empty(query_heads, tokens, dtype=torch.float32)
    for head in range(query_heads):
        value = values[:, head // group * dim :][:, :dim].float()
        weight = output_weight[:, head * dim :][:, :dim].float()
        scores[head] = most[head] * (value @ weight.t()).norm(dim=1)
    best = scores.view(heads, group, tokens).amax(1).t()
    return best.log().clamp_min(FLOOR)
