"""Refuses, before any allocation, configurations that VeriCache cannot serve exactly.

A server that reads a block-table row with wrong slots looks healthy, so the rules are
strict: a feature that was not verified against draft block tables is refused by name.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import UnsupportedError
from vericache_sglang.serving.refused_disaggregation import (
    DECODE_RULES,
    DecodeServer,
)
from vericache_sglang.serving.refused_draft_first import (
    DRAFT_FIRST_RULES,
    DraftFirst,
)
from vericache_sglang.serving.refused_drafters import (
    DRAFTING_RULES,
    PAIR_RULES,
    Drafting,
    DraftPair,
)
from vericache_sglang.serving.refused_flags import FLAG_RULES
from vericache_sglang.serving.refused_machines import MACHINE_RULES
from vericache_sglang.serving.refused_models import MODEL_RULES
from vericache_sglang.serving.refused_roles import ROLE_RULES, AskedRole

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.serving.refused_machines import LocalMachine
    from vericache_sglang.serving.rule import Rule

SGLANG_VERSION = "0.5.21"
"""The only supported version of SGLang; hooks and adapters depend on its internals."""

WAY_OUT = "or serve without VeriCache: --disable-vericache"


def check_sglang_version() -> None:
    """Confirm that the installed SGLang is ``SGLANG_VERSION``.

    Raises:
        UnsupportedError: Another version is installed, or none.
    """
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        installed = "none"
    if installed != SGLANG_VERSION:
        raise UnsupportedError(
            f"sglang {installed} is installed, VeriCache needs exactly "
            f"{SGLANG_VERSION}; python -m vericache_sglang.doctor says how to get it"
        )


def check_machine(machine: LocalMachine) -> None:
    """Confirm that a GPU server can start on this GPU with these packages.

    Args:
        machine: See ``this_machine``.

    Raises:
        UnsupportedError: It cannot; the message lists every reason, and the commands
            that install what is missing.
    """
    _refuse("machine", MACHINE_RULES, machine, "or serve on the CPU: --device cpu")


def check_server_args(server_args: Any) -> None:
    """Confirm that no flag asks for what VeriCache cannot serve exactly.

    Args:
        server_args: SGLang's ``ServerArgs``, or the view that
            ``CustomSpecAlgo.handle_server_args`` gets; read only.

    Raises:
        UnsupportedError: At least one flag does; the message lists all of them.
    """
    _refuse("server", FLAG_RULES, server_args)


def check_model(model_config: Any) -> None:
    """Confirm that VeriCache can compress the KV of a model's attention.

    Args:
        model_config: SGLang's ``ModelConfig``; read only.

    Raises:
        UnsupportedError: It is not; the message lists every reason.
    """
    architectures = getattr(model_config.hf_config, "architectures", None) or ["?"]
    _refuse(f"model {architectures[0]}", MODEL_RULES, model_config)


def check_drafter(config: VeriCacheConfig, server_args: Any, model_config: Any) -> None:
    """Confirm that the drafter that has weights can propose tokens, if there is one.

    Args:
        config: Settings of VeriCache.
        server_args: As in ``check_server_args``.
        model_config: The served model's.

    Raises:
        UnsupportedError: It cannot; the message lists every reason.
    """
    asked = Drafting(config, server_args)
    _refuse("inner drafter", DRAFTING_RULES, asked)
    if asked.weighted:
        from vericache_sglang.runtime.draft_model import draft_model_config

        pair = DraftPair(config, model_config, draft_model_config(server_args))
        _refuse("inner drafter", PAIR_RULES, pair)


def check_decode_server(config: VeriCacheConfig, server_args: Any) -> None:
    """Confirm that a decode server of a prefill/decode pair can serve as asked.

    Args:
        config: Settings of VeriCache.
        server_args: As in ``check_server_args``; other servers pass.

    Raises:
        UnsupportedError: It cannot; the message lists every reason.
    """
    if server_args.disaggregation_mode == "decode":
        _refuse("decode server", DECODE_RULES, DecodeServer(config, server_args))


def check_role(config: VeriCacheConfig, server_args: Any) -> None:
    """Confirm that a drafter or verifier has all it needs, and leaves no open door.

    Args:
        config: Settings of VeriCache.
        server_args: As in ``check_server_args``.

    Raises:
        UnsupportedError: It does not; the message lists every reason.
    """
    asked = AskedRole(config, server_args)
    _refuse(f"{config.role} server", ROLE_RULES, asked)


def check_draft_first(config: VeriCacheConfig, server_args: Any) -> None:
    """Confirm that requests can start on stored draft KV, if they are to.

    Args:
        config: Settings of VeriCache.
        server_args: As in ``check_server_args``.

    Raises:
        UnsupportedError: They cannot; the message lists every reason.
    """
    asked = DraftFirst(config, server_args)
    if asked.asking:
        _refuse(f"server with {asked.asking}", DRAFT_FIRST_RULES, asked)


def _refuse(
    subject: str, rules: Iterable[Rule], target: Any, way_out: str = WAY_OUT
) -> None:
    broken = [rule for rule in rules if rule.broken(target)]
    if not broken:
        return
    reasons = "".join(
        f"\n  {rule.what}: {rule.reason}; {rule.remedy}".format(target)
        for rule in broken
    )
    raise UnsupportedError(f"VeriCache refuses this {subject}:{reasons}\n  {way_out}")
