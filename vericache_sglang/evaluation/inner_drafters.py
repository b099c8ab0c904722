"""Inner drafters that a study's model has, and the systems they make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import ConfigError
from vericache_sglang.evaluation.benchmark import (
    DEMO,
    DEMO_DRAFT,
    DEMO_HEAD,
    DEMO_LONG,
)
from vericache_sglang.evaluation.systems import described

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping
    from pathlib import Path

    from vericache_sglang.evaluation.systems import System

NAMES: Mapping[str, str] = {
    "eagle3": "EAGLE3",
    "model": "small model",
    "ngram": "n-gram",
    "mtp": "MTP",
}
"""Of systems, by ``--vericache-inner``."""

WEIGHTS: Mapping[str, Mapping[str, Path]] = {
    "eagle3": {DEMO.name: DEMO_HEAD},
    "model": {DEMO.name: DEMO_DRAFT, DEMO_LONG.name: DEMO_DRAFT},
}
"""Drafter with weights of its own -> folder of a model -> folder of its drafter."""

OPTION: Mapping[str, tuple[Any, str]] = {
    "drafters": (
        ["eagle3", "model", "ngram"],
        f"of {', '.join(NAMES)}; eagle3=FOLDER, model=FOLDER, where the model is no "
        "demo model",
    ),
}

NEVER = 1 << 20
"""Tokens from which prompts are compressed where none is to be."""


@dataclass(frozen=True, slots=True)
class StudyDrafter:
    """One inner drafter of a model.

    Attributes:
        inner: As ``--vericache-inner``.
        weights: Folder or name of a head or small model; "" for one without.
    """

    inner: str
    weights: str

    @property
    def name(self) -> str:
        """As in the names of its systems."""
        return NAMES[self.inner]

    def under(
        self, settings: Mapping[str, Any], name: str, about: str, alteration: str = ""
    ) -> System:
        """Return VeriCache with this drafter.

        Args:
            settings: VeriCache's, by field name.
            name: Of the system.
            about: See ``System``.
            alteration: See ``System``.
        """
        path = {"speculative_draft_model_path": self.weights} if self.weights else {}
        mine = {**settings, "inner": self.inner}
        return described(name, mine, path, about=about, alteration=alteration)

    def alone(self, **more: Any) -> System:
        """Return this drafter on the full KV: nothing is compressed.

        Args:
            more: Further settings of VeriCache.
        """
        return self.under(
            {"min_prompt": NEVER, **more},
            f"{self.name} alone",
            "chains of proposals, as many as pay, verified on the full KV by this "
            "server; nothing is compressed. SGLang's own speculation, with trees, "
            "needs a GPU: `bench --system`",
        )


def chosen(
    options: argparse.Namespace,
) -> tuple[list[StudyDrafter], dict[str, str]]:
    """Return the drafters of ``--drafters``, and why others of it are left out.

    Args:
        options: The command line, with ``OPTION`` and the model's folder.

    Raises:
        ConfigError: A drafter is unknown or given twice, or has no weights to name.
    """
    found: dict[str, StudyDrafter] = {}
    left: dict[str, str] = {}
    for given in options.drafters:
        inner, sign, weights = given.partition("=")
        if inner not in NAMES or (sign and inner not in WEIGHTS) or inner in found:
            known = ", ".join(NAMES)
            raise ConfigError(f"--drafters {given}; each once, known: {known}")
        if inner in WEIGHTS and not weights:
            model = options.model.name
            if model not in WEIGHTS[inner]:
                left[NAMES[inner]] = (
                    f"no drafter of {model} comes with this project: `--drafters "
                    f"{inner}=FOLDER`, or `--model` {' or '.join(WEIGHTS[inner])}"
                )
                continue
            weights = str(WEIGHTS[inner][model])
        found[inner] = StudyDrafter(inner, weights)
    return [*found.values()], left
