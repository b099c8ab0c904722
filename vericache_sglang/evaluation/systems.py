"""The systems that are compared, and the command line that starts each."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from vericache_sglang.config.schema import flag
from vericache_sglang.errors import ConfigError
from vericache_sglang.evaluation.altered import LOSSY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

REFERENCE = "plain"
"""The reference system: its answers are right, and its speed is 1."""

OFF = "--disable-vericache"
SPECULATION = "--speculative-algorithm"
DRAFT_PATH = "--speculative-draft-model-path"
DRAFT_MODEL, SERVED_MODEL = "{--draft-model}", "{--model}"
"""Values of ``DRAFT_PATH`` until it is known which models are meant (``weighted``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to serve.

    Attributes:
        name: As it appears in results.
        about: Description, with differences from the system it is named after.
        flags: Flags of ``launch_server``, after those all systems share.
        alteration: Alteration of the server's code by a benchmark; see ``altered``.
        environment: Variables of the server's processes beyond the benchmark's.
        url: URL of a running server; "" starts one.
    """

    name: str
    about: str = ""
    flags: tuple[str, ...] = ()
    alteration: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    url: str = ""

    @property
    def has_vericache(self) -> bool:
        """Whether the server drafts; plain SGLang and its own speculation do not."""
        return OFF not in self.flags

    @property
    def lossy(self) -> bool:
        """Whether its answers may differ from the reference's by design."""
        return self.alteration == LOSSY


def described(
    name: str,
    settings: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    **more: Any,
) -> System:
    """Describe a system by fields instead of flags.

    Args:
        name: As it appears in results.
        settings: VeriCache's, by field name; None serves plain SGLang.
        engine: Fields of SGLang's ``ServerArgs``; True is a flag without a value.
        more: Further attributes of ``System``.
    """
    flags = [OFF] if settings is None else []
    for field_name, value in (settings or {}).items():
        flags += [flag(field_name), str(value)]
    flags += engine_flags(engine or {})
    return System(name=name, flags=tuple(flags), **more)


def engine_flags(engine: Mapping[str, Any]) -> list[str]:
    """Return the flags of fields of SGLang's ``ServerArgs``."""
    flags = []
    for field_name, value in engine.items():
        spelled = f"--{field_name.replace('_', '-')}"
        flags += [spelled] if value is True else [spelled, str(value)]
    return flags


INNER: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "ngram": ("prompt lookup", ()),
    "model": ("the small model --draft-model", (DRAFT_PATH, DRAFT_MODEL)),
    "eagle3": ("the EAGLE3 head --draft-model", (DRAFT_PATH, DRAFT_MODEL)),
    "mtp": ("the MTP head of the model's own checkpoint", ()),
}
"""Inner drafters: what they are, and the flags of their weights."""

SGLANG: Mapping[str, tuple[str, ...]] = {
    "ngram": ("NGRAM",),
    "standalone": ("STANDALONE", DRAFT_PATH, DRAFT_MODEL),
    "eagle3": ("EAGLE3", DRAFT_PATH, DRAFT_MODEL),
    "mtp": ("EAGLE", DRAFT_PATH, SERVED_MODEL),
}
"""SGLang's own speculation: its algorithm, and the flags of its weights."""


def _drafted(inner: str) -> tuple[System, System]:
    what, weights = INNER[inner]
    flags = ("--vericache-inner", inner, *weights)
    return (
        System(
            name=f"{inner}-alone",
            about=f"VeriCache's {what} on the full KV: nothing is compressed",
            flags=(*flags, "--vericache-min-prompt", str(1 << 20)),
        ),
        System(
            name=f"vericache-{inner}",
            about=f"VeriCache with {what} as its inner drafter",
            flags=flags,
        ),
    )


BUILT_IN: Mapping[str, System] = {
    system.name: system
    for system in (
        System(
            name=REFERENCE,
            about="SGLang without VeriCache, the same attention backend",
            flags=(OFF,),
        ),
        System(
            name="lossy",
            about="the draft KV served alone: drafts are emitted as they come, "
            "nothing is verified or prefetched; each prompt's rest is still copied to "
            "the host once, which a lossy server would not do",
            flags=("--vericache-residency", "host"),
            alteration=LOSSY,
        ),
        *(
            System(
                name=f"sglang-{name}",
                about=f"SGLang's {flags[0]} speculation, its defaults; needs a GPU",
                flags=(OFF, SPECULATION, *flags),
            )
            for name, flags in SGLANG.items()
        ),
        System(
            name="sparse",
            about="as SparseSpec: the full KV stays on the device, drafts read a copy "
            "of the selected part (SparseSpec reads it in place); selected once after "
            "the prompt, not every cycle",
            flags=("--vericache-residency", "device"),
        ),
        System(
            name="offload",
            about="plain offloading: the KV off the device is brought back for every "
            "verification of one draft, so for every one or two tokens",
            flags=("--vericache-residency", "host", "--vericache-draft-length", "1"),
        ),
        *(system for inner in INNER for system in _drafted(inner)),
        System(
            name="vericache",
            about="VeriCache; where KV is and when drafting pays is its own choice",
        ),
    )
}
"""What ``--systems`` may name."""


def chosen_systems(
    names: Sequence[str], variants: Sequence[str], urls: Sequence[str]
) -> tuple[System, ...]:
    """Return the systems of a command line, in its order.

    Args:
        names: Of ``BUILT_IN``, or of ``urls``.
        variants: ``NAME=FLAGS``, flags as on a command line.
        urls: ``NAME=URL`` of servers that run already.

    Raises:
        ConfigError: A name is unknown or given twice, or a value is malformed.
    """
    running = dict(_pair("--base-url", given) for given in urls)
    systems: dict[str, System] = {}
    for name in names:
        if name not in BUILT_IN and name not in running:
            raise ConfigError(f"--systems {name}; known: {', '.join(BUILT_IN)}")
        _add(systems, BUILT_IN.get(name, System(name=name, about="given by its URL")))
    for given in variants:
        name, flags = _pair("--system", given)
        _add(
            systems,
            System(name=name, about="by its flags", flags=words("--system", flags)),
        )
    for name, url in running.items():
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url {name}={url}: the URL begins with http://")
        if name not in systems:
            raise ConfigError(f"--base-url {name}: not in --systems")
        systems[name] = replace(systems[name], url=url.rstrip("/"))
    if not systems:
        raise ConfigError("--systems is empty")
    return tuple(systems.values())


def weighted(system: System, model: str | None, draft: str | None) -> System:
    """Return a system with the weights of its drafter.

    Args:
        system: A built-in one, or any other.
        model: The served model.
        draft: The small model or head.

    Raises:
        ConfigError: It needs a draft model, and none is given.
    """
    paths = {DRAFT_MODEL: draft, SERVED_MODEL: model}
    flags = [paths.get(word, word) for word in system.flags]
    if None in flags:
        raise ConfigError(
            f"--systems {system.name} needs --draft-model: a small model or an EAGLE3 "
            "head of the model"
        )
    return replace(system, flags=tuple(map(str, flags)))


def speculation_lacks() -> str:
    """Return what SGLang's own speculation lacks on this machine; "" for nothing."""
    missing = [
        *([] if torch.cuda.is_available() else ["a CUDA device"]),
        *([] if find_spec("sgl_kernel") else ["the package sglang-kernel"]),
    ]
    return " and ".join(missing)


def command(
    system: System, model: str, port: int, shared: Sequence[str], ours: Sequence[str]
) -> list[str]:
    """Return the command that starts a system's server.

    Args:
        system: Not running yet.
        model: Folder or name, as ``--model-path``.
        port: Of the loopback device.
        shared: SGLang flags of every system.
        ours: VeriCache flags of every system that drafts.
    """
    return [
        *(sys.executable, "-m", "vericache_sglang.launch_server"),
        *("--model-path", model, "--host", "127.0.0.1", "--port", str(port)),
        *shared,
        *(ours if system.has_vericache else ()),
        *system.flags,
    ]


def words(flag: str, text: str) -> tuple[str, ...]:
    """Tokenise the value of ``flag`` as a shell would.

    Raises:
        ConfigError: A quote is left open.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}: {error}") from error


def _pair(flag: str, given: str) -> tuple[str, str]:
    name, sign, value = given.partition("=")
    if not (name and sign):
        raise ConfigError(f"{flag} must be NAME=..., got {given!r}")
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"{flag}: a name is of letters, digits, - and _: {name!r}")
    return name, value


def _add(systems: dict[str, System], system: System) -> None:
    if system.name in systems:
        raise ConfigError(f"--systems, --system: {system.name} is given twice")
    systems[system.name] = system
