"""The demo tokenizer: whole words of the generator, digits apart, bytes for the rest.

A Unigram model over byte-level pre-tokens. Nothing is trained: each word of the
generator is given as one piece, and the 256 bytes make any other text round-trip.
"""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)

from vericache_sglang import demo_records as records

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL = (
    *("<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "<unk>",
)
PUNCTUATION = ('":', ',"', '{"', '":{"', '"}}', "}}")
CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] "
    "+ '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|assistant|>' }}{% endif %}"
)
SAMPLES = 3000  # conversations read for their words; every word shows up in far fewer


def load(folder: Path) -> Tokenizer:
    """Read ``tokenizer.json`` of a checkpoint folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of ``text``; special tokens count where it spells them out."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def pieces() -> list[str]:
    """Return the whole-word pieces, sorted: what the generator writes, no more."""
    word_breaks = pre_tokenizer()
    rng = random.Random(0)
    found = set(PUNCTUATION)
    for _ in range(SAMPLES):
        drawn, text = records.document(rng, 2, 0.5)
        for entry in drawn:
            text += "\n" + "\n".join(records.request(rng, entry))
        for word, _ in word_breaks.pre_tokenize_str(text):
            if len(word) > 1 and re.search("[A-Za-z]", word):
                found.add(word)
    return sorted(found)


def pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """Return GPT-2's byte-level division into words, with every digit apart."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def build() -> Tokenizer:
    """Build the tokenizer; the same on every call, so ids are those shipped."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [
        *((token, 0.0) for token in SPECIAL),
        *((letter, -12.0) for letter in letters),
        *((word, -8.0) for word in pieces()),
    ]
    unknown = SPECIAL.index("<unk>")
    built = Tokenizer(models.Unigram(vocabulary, unk_id=unknown, byte_fallback=False))
    built.pre_tokenizer = pre_tokenizer()
    built.decoder = decoders.ByteLevel()
    built.post_processor = processors.TemplateProcessing(
        single="$A", pair="$A $B:1", special_tokens=[]
    )
    built.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    return built


def save(built: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer, its Hugging Face config and the chat template to ``folder``.

    Args:
        built: What ``build`` returned.
        folder: Made where missing.
        max_length: ``model_max_length`` of the config, in tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    built.save(str(folder / "tokenizer.json"))
    config = {
        "backend": "tokenizers",
        "bos_token": "<s>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|end|>",
        "model_max_length": max_length,
        "pad_token": "<pad>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
