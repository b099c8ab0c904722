"""The model under calibration: any causal language model of Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vericache_sglang.calibrate.cache import RecordingCache, RoundedCache
from vericache_sglang.compression.base import ModelSpec
from vericache_sglang.compression.codecs.artifact import CalibratedModel
from vericache_sglang.compression.codecs.fingerprint import model_fingerprint
from vericache_sglang.compression.codecs.rope import Rope
from vericache_sglang.errors import ConfigError, UnsupportedError
from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops

if TYPE_CHECKING:
    from collections.abc import Sequence

PROBE_TOKENS = 8
PROBE_SHIFT = 37
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE whose angles do not depend on the length of the prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A loaded model; nothing here changes it.

    Attributes:
        net: ``AutoModelForCausalLM``, in evaluation mode, without gradients.
        folder: Folder of its files.
    """

    net: Any
    folder: Path

    @property
    def like(self) -> torch.Tensor:
        """An empty tensor with the model's compute dtype and device."""
        weights: torch.Tensor = self.net.get_input_embeddings().weight
        return weights.new_empty(0)

    @property
    def ends(self) -> frozenset[int]:
        """Ids of the tokens that end an answer."""
        given = self.net.generation_config.eos_token_id
        if given is None:
            return frozenset()
        return frozenset([given] if isinstance(given, int) else given)

    def run(
        self, tokens: Sequence[int], cache: RoundedCache, last: int = 0, **options: Any
    ) -> Any:
        """Run tokens after those of a cache and append their KV to it.

        Args:
            tokens: Token ids.
            cache: KV of the preceding tokens; extended in place.
            last: Number of last positions to return logits for; 0: all.
            **options: Passed to the model's forward.

        Returns:
            The model's output, with logits [1, n, V].
        """
        ids = torch.tensor([list(tokens)], device=self.like.device)
        return self.net(
            ids, past_key_values=cache, use_cache=True, logits_to_keep=last, **options
        )

    def model(self) -> CalibratedModel:
        """Return the model's identity, stored in files calibrated on it.

        Raises:
            UnsupportedError: See ``shape``.
            ConfigError: See ``model_fingerprint``.
        """
        layers, heads, dim = self.shape()
        return CalibratedModel(
            name=self.folder.name,
            fingerprint=model_fingerprint(self.folder),
            layers=layers,
            kv_heads=heads,
            head_dim=dim,
        )

    def spec(self) -> ModelSpec:
        """Return the shapes as a server knows them.

        Raises:
            UnsupportedError: See ``shape``.
        """
        layers, heads, dim = self.shape()
        config = self.net.config.get_text_config()
        return ModelSpec(
            layers=layers,
            query_heads=config.num_attention_heads,
            kv_heads=heads,
            head_dim=dim,
            hidden_size=config.hidden_size,
            name=str(self.folder),
        )

    @torch.inference_mode()
    def shape(self) -> tuple[int, int, int]:
        """Return layers, KV heads and head dim as the cache has them.

        Raises:
            UnsupportedError: Layers differ, or do not keep every token.
        """
        cache = RoundedCache(torch.float32)
        self.run(_probe(), cache, last=1)
        shapes = {tuple(kv.keys.shape) for kv in cache.exact()}
        if len(shapes) != 1 or next(iter(shapes))[1] != PROBE_TOKENS:
            raise UnsupportedError(
                f"{self.folder}: every layer must keep keys of the same shape for "
                f"every token; of {PROBE_TOKENS} tokens they keep {sorted(shapes)}"
            )
        heads, _, dim = shapes.pop()
        return len(cache.layers), heads, dim

    @torch.inference_mode()
    def rope(self) -> Rope:
        """Return the model's rotary embedding, checked against the model.

        Keys of the first layer depend on token and position only, so the same tokens
        at other positions must have the same keys once the rotation is undone.

        Raises:
            UnsupportedError: There is no such rotation, or not one of half against
                half with fixed angles.
        """
        rope = self._stated_rope()
        found = []
        for shift in (0, PROBE_SHIFT):
            positions = torch.arange(PROBE_TOKENS) + shift
            ids = torch.tensor([_probe()], device=self.like.device)
            cache, where = RecordingCache(), positions[None].to(ids.device)
            self.net(ids, position_ids=where, past_key_values=cache)
            keys = cache.seen[0].keys[0].to("cpu", torch.float32)
            found.append(rope(keys, positions, inverse=True))
        rounding = 64 * torch.finfo(self.like.dtype).eps
        error = (found[1] - found[0]).norm() / found[0].norm()
        if not error <= max(rounding, 1e-4):
            raise UnsupportedError(
                f"{self.folder}: its keys are not rotated half against half by the "
                f"angles it states: undone at two places they differ by {error:.2g}"
            )
        return rope

    def _stated_rope(self) -> Rope:
        """Return the rotary embedding that the model's config names.

        Raises:
            UnsupportedError: None, several, or angles that change with the length.
        """
        stated = [part for part in self.net.modules() if hasattr(part, "inv_freq")]
        kinds = [getattr(part, "rope_type", "default") for part in stated]
        if len(stated) != 1 or kinds[0] not in STATIC_ROPE:
            raise UnsupportedError(
                f"{self.folder}: one rotary embedding of fixed angles is needed "
                f"({', '.join(STATIC_ROPE)}), found {kinds}"
            )
        amplitude = float(getattr(stated[0], "attention_scaling", 1.0))
        return Rope(stated[0].inv_freq.detach().to("cpu", torch.float32), amplitude)


def load(name: str, device: str, dtype: str) -> tuple[Subject, Any]:
    """Load a model and its tokenizer.

    Args:
        name: Folder, or a name that Hugging Face's own cache or hub knows.
        device: "auto" is CUDA where present, else the CPU.
        dtype: Of the computation; "auto" is float32 on a CPU, the checkpoint's own on
            a GPU.

    Raises:
        ConfigError: It cannot be loaded; the message names it.
    """
    define_missing_ops()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto" and device == "cpu":
        dtype = "float32"
    try:
        folder = _folder(name)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        net = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        net = net.eval().requires_grad_(False).to(device)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"MODEL {name}: cannot be loaded: {reason}") from error
    return Subject(net, folder), tokenizer


def _folder(name: str) -> Path:
    """Return the folder of a model, fetched where only its name is known.

    Raises:
        OSError: There is none.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name))
    except HFValidationError:
        raise OSError("no such folder, and no name of a model") from None


def _probe() -> list[int]:
    """Return the tokens of a trial run; any will do."""
    return list(range(PROBE_TOKENS))
