"""The launcher: parses VeriCache's flags and starts SGLang's server with VeriCache."""

from __future__ import annotations

import argparse
import os
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vericache_sglang.config.cli import add_flags, given_values
from vericache_sglang.config.files import is_disabled, load_config, publish
from vericache_sglang.config.schema import (
    boot_line,
    fields,
    flag,
    nearest,
    resolve_host,
    resolve_staging,
)
from vericache_sglang.device.host_limit import available_host_bytes
from vericache_sglang.errors import ConfigError, UnsupportedError, VeriCacheError
from vericache_sglang.serving.refusals import (
    check_machine,
    check_server_args,
    check_sglang_version,
)
from vericache_sglang.serving.refused_flags import ALGORITHM, BACKEND
from vericache_sglang.serving.refused_machines import this_machine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vericache_sglang.config.schema import VeriCacheConfig

PROGRAM = "python -m vericache_sglang.launch_server"

CPU_DEFAULTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "device": ("cpu", ()),
    "attention_backend": (BACKEND, ()),
    "dtype": ("float32", ()),
    "cuda_graph_backend_decode": ("disabled", ("disable_cuda_graph",)),
    "cuda_graph_backend_prefill": ("disabled", ("disable_cuda_graph",)),
    "max_total_tokens": ("131072", ("mem_fraction_static",)),
    "max_running_requests": ("64", ()),
}
"""SGLang field a CPU server needs -> value, and fields that override it if given.

By default SGLang reserves most of the machine's memory, and a block-table row for each
of 4096 requests; touching those pages takes a CPU most of a minute.
"""

OWNED_FLAGS: Mapping[str, str] = {
    "speculative_num_steps": flag("draft_length"),
    "speculative_num_draft_tokens": flag("draft_length"),
    "speculative_eagle_topk": flag("draft_length"),
}
"""SGLang's settings that VeriCache decides -> the VeriCache flag that decides."""

OPEN = (
    "VeriCache: warning: whoever reaches {0.host}:{0.port} may send requests, change "
    "the weights and read on GET /vericache what runs; give --api-key KEY, or --host "
    "127.0.0.1 (--vericache-live-page off leaves the page out)"
)
"""Warning printed below the boot line of a server for which ``is_open`` holds."""

SEVERAL = (
    "VeriCache: warning: GET /vericache and the consistency check need "
    "--tokenizer-worker-num 1"
)
"""Warning of a server whose HTTP processes the launcher cannot extend."""


def own_parser() -> argparse.ArgumentParser:
    """Build the parser of VeriCache's flags; SGLang's flags are unknown to it."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} --model-path MODEL [VeriCache flags] [SGLang flags]",
        description="An SGLang server that drafts on a compressed KV cache.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--vericache-config",
        type=Path,
        metavar="FILE.yaml",
        help="settings file, see configs/; flags win over it",
    )
    parser.add_argument(
        "--disable-vericache",
        action="store_true",
        help="serve with plain SGLang; on a CPU with the same attention backend",
    )
    add_flags(parser)
    return parser


def split_arguments(
    argv: Sequence[str],
) -> tuple[VeriCacheConfig | None, list[str]]:
    """Separate VeriCache's flags from SGLang's.

    Args:
        argv: The whole command line, without the program.

    Returns:
        The settings, None if VeriCache is off; and the remaining flags, for SGLang.

    Raises:
        ConfigError: A VeriCache flag is misspelled, or a setting is wrong.
    """
    known, rest = own_parser().parse_known_args(list(argv))
    stray = [word for word in rest if word.startswith("--vericache")]
    if stray:
        known_flags = dict.fromkeys(["--vericache-config", *map(flag, fields())])
        hint = nearest(stray[0].partition("=")[0], known_flags)
        raise ConfigError(f"unknown flag {stray[0]}; {hint}")
    settings = given_values(known)
    if known.disable_vericache:
        return None, rest
    if is_disabled() and not settings and known.vericache_config is None:
        return None, rest
    return load_config(known.vericache_config, settings), rest


def complete(
    rest: Sequence[str],
    given: Mapping[str, object],
    *,
    enabled: bool,
    cuda: bool,
) -> list[str]:
    """Add the SGLang arguments that VeriCache needs and the user left out.

    Args:
        rest: SGLang's part of the command line.
        given: SGLang field -> value of the flags in ``rest`` (see ``given_fields``).
        enabled: Whether VeriCache is on.
        cuda: Whether a CUDA device is visible; decides the device if no flag does.

    Raises:
        UnsupportedError: A flag sets a field that VeriCache decides.
    """
    added: list[str] = []
    if str(given.get("device") or ("cuda" if cuda else "cpu")).startswith("cpu"):
        for field, (value, instead) in CPU_DEFAULTS.items():
            if not given.keys() & {field, *instead}:
                added += [_spell(field), value]
    if enabled:
        for field, ours in OWNED_FLAGS.items():
            if field in given:
                raise UnsupportedError(
                    f"{_spell(field)} follows from {ours}; use that one"
                )
        if "speculative_algorithm" not in given:
            added += ["--speculative-algorithm", ALGORITHM]
    return [*rest, *added]


def check_draft_path(given: Mapping[str, object]) -> None:
    """Refuse a small model that cannot be found, before SGLang looks for it.

    Args:
        given: See ``complete``.

    Raises:
        ConfigError: There is no such folder or repository, or it has no config.json.
    """
    path = given.get("speculative_draft_model_path")
    if path is None:
        return
    from sglang.srt.utils.hf_transformers_utils import get_config

    trusted = bool(given.get("trust_remote_code"))
    try:
        get_config(path, trusted, given.get("speculative_draft_model_revision"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--speculative-draft-model-path {path}: no model is found there: {error}; "
            "name a folder with a config.json, or a repository on the hub"
        ) from error


def _spell(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def main(argv: Sequence[str] | None = None) -> int:
    """Start a server and block until it ends.

    Args:
        argv: The command line without the program; None takes the process's own.

    Returns:
        Exit status: 0 after a clean stop, 2 if a setting was refused.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if {"-h", "--help"} & set(arguments):
            _help()
        else:
            _serve(*split_arguments(arguments))
    except VeriCacheError as error:
        print(f"vericache: error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _help() -> None:
    own_parser().print_help()
    print("\nEvery flag of SGLang works too:\n", flush=True)
    from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops

    define_missing_ops()
    from sglang.srt.plugins import load_plugins

    load_plugins()  # plugins add choices to some of SGLang's flags
    from sglang.srt.server_args import prepare_server_args

    prepare_server_args(["--help"])


def _serve(config: VeriCacheConfig | None, rest: list[str]) -> None:
    """Start SGLang's server; its processes read the settings from the environment."""
    publish(config)
    check_sglang_version()
    if config is not None:
        _check_gpu(rest)
    from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops

    define_missing_ops()  # before SGLang imports transformers, which needs them
    _load_plugins()
    import torch
    from sglang.srt.server_args import prepare_server_args

    given = given_fields(rest)
    if config is not None:
        check_draft_path(given)
    arguments = complete(
        rest,
        given,
        enabled=config is not None,
        cuda=torch.cuda.is_available(),
    )
    server_args = prepare_server_args(arguments)
    if server_args.device == "cpu" and not server_args.enable_torch_compile:
        # SGLang compiles small functions lazily, 20 s for the first seeded token.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if config is None:
        print("VeriCache: off", flush=True)
    else:
        check_server_args(server_args)
        effective = _effective(config, server_args)
        publish(config.model_copy(update={"host_gb": effective.host_gb}))
        print(boot_line(effective), flush=True)
        if is_open(server_args.host, server_args.api_key):
            print(OPEN.format(server_args), file=sys.stderr, flush=True)
    _run(server_args)


def is_open(host: str, api_key: str | None) -> bool:
    """Return whether other machines may reach a server that requires no key."""
    if api_key:
        return False
    try:
        return not ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host != "localhost"


def _check_gpu(rest: Sequence[str]) -> None:
    """Refuse an unsupported GPU, driver or package; a CPU is not checked."""
    import torch

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for field in ("device", "attention_backend"):
        parser.add_argument(_spell(field))
    given, _ = parser.parse_known_args(list(rest))
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda"):
        check_machine(this_machine(given.attention_backend))


def _effective(config: VeriCacheConfig, server_args: Any) -> VeriCacheConfig:
    """Fill in the automatic settings: staging buffer size and host memory."""
    from sglang.srt.arg_groups.model_override_base import model_config_of

    context: int = model_config_of(server_args).context_len
    free = available_host_bytes()
    return config.model_copy(
        update={
            "staging_tokens": resolve_staging(config, context),
            "host_gb": resolve_host(config, free, server_args.tp_size),
        }
    )


def given_fields(argv: Sequence[str]) -> dict[str, object]:
    """Return SGLang's fields that a command line, or its ``--config``, sets.

    SGLang's own parser reads them, so abbreviations and ``--flag=value`` count too.
    """
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog=PROGRAM)
    ServerArgs.add_cli_args(parser)
    words = list(argv)
    if "--config" in words:
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

        words = ConfigArgumentMerger(parser).merge_config_with_args(words)
    for action in parser._actions:  # argparse shows them in no public place
        action.default = argparse.SUPPRESS
    return vars(parser.parse_args(words))


def _load_plugins() -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_registry import get_spec

    load_plugins()
    # SGLang logs a plugin that fails and goes on without it.
    if get_spec(ALGORITHM) is None:
        raise UnsupportedError(
            "SGLang did not load the VeriCache plugin; see the errors above, and "
            "install the project: pip install --no-deps -e ."
        )


def _run(server_args: Any) -> None:
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils import kill_process_tree

    from vericache_sglang.serving.http_server import extend_at_start

    if server_args.tokenizer_worker_num == 1:
        extend_at_start(http_server.app)
    else:
        print(SEVERAL, file=sys.stderr, flush=True)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
