"""Settings as YAML and JSON text, and the one reader of ``VERICACHE_CONFIG``."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from vericache_sglang.config.schema import VeriCacheConfig, defaults, flag, options
from vericache_sglang.errors import ConfigError

ENV = "VERICACHE_CONFIG"
"""Carries the settings to SGLang's processes: a YAML path, inline JSON or ``off``."""

OFF = "off"


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice instead of taking the last one."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, Any]:
        """Build the mapping of ``node``; raises ``yaml.YAMLError`` on a repeat."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = sorted({str(key) for key in keys if keys.count(key) > 1})
        if repeated:
            raise yaml.YAMLError(f"written twice: {', '.join(repeated)}")
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


def read_yaml(path: Path) -> dict[str, object]:
    """Return the fields a YAML file sets; unchecked, absent fields left out.

    Raises:
        ConfigError: The file cannot be read, or is not a mapping of fields.
    """
    try:
        text = path.read_text(encoding="utf-8")
        # _Loader is a SafeLoader: it builds plain data, never objects.
        values = yaml.load(text, Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}); give --vericache-config an existing "
            "YAML file"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not valid YAML: {error}") from error
    if values is None:
        return {}
    return _fields(values, str(path))


def config_from(values: Mapping[str, object], source: str) -> VeriCacheConfig:
    """Build the settings from field values.

    Args:
        values: Field name -> value; absent fields take their default.
        source: Where the values are from, first words of any error.

    Raises:
        ConfigError: A field is unknown, of the wrong type or out of bounds.
    """
    known = _fields(values, source)
    try:
        return VeriCacheConfig(**known)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def load_config(path: Path | None, flags: Mapping[str, object]) -> VeriCacheConfig:
    """Combine flags, a YAML file and the environment; the earlier of these wins.

    Args:
        path: The file of ``--vericache-config``; where it is None, ``ENV`` takes its
            place.
        flags: Field name -> value of the flags that were given.

    Raises:
        ConfigError: See ``parse_setting`` and ``config_from``.
    """
    if path is None:
        base = parse_setting(os.environ.get(ENV, ""))
    else:
        # A bad field is an error even where a flag would win.
        base = config_from(read_yaml(path), str(path))
    values = asdict(base) if base is not None else {}
    return config_from({**values, **flags}, "command line")


def to_yaml(config: VeriCacheConfig) -> str:
    """Return ``config`` as YAML, every field under a comment from the schema."""
    blocks = []
    for name, value in asdict(config).items():
        opt = options()[name]
        notes = [opt.help, opt.unit, opt.bounds(), f"default {defaults()[name]}"]
        comment = "; ".join(note for note in notes if note)
        blocks.append(f"# {comment}\n{yaml.safe_dump({name: value})}")
    return "\n".join(blocks)


def to_json(config: VeriCacheConfig) -> str:
    """Return ``config`` as one line of JSON, the inline form of ``ENV``."""
    return json.dumps(asdict(config))


def parse_setting(value: str) -> VeriCacheConfig | None:
    """Return what a value of ``ENV`` stands for; None for "" and ``off``.

    Raises:
        ConfigError: Neither inline JSON nor a readable YAML file, or a bad field.
    """
    value = value.strip()
    if value in ("", OFF):
        return None
    if not value.startswith("{"):
        path = Path(value)
        return config_from(read_yaml(path), f"{ENV}: {path}")
    try:
        values = json.loads(value)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{ENV} is not valid JSON: {error}") from error
    return config_from(_fields(values, ENV), ENV)


@cache
def active_config() -> VeriCacheConfig | None:
    """Return the settings of this process, read once; None where none were given.

    None means "unset" or "off", told apart by ``is_disabled``; where the algorithm was
    asked for but nothing was set, callers use ``VeriCacheConfig()``.

    Raises:
        ConfigError: See ``parse_setting``.
    """
    return parse_setting(os.environ.get(ENV, ""))


def is_disabled() -> bool:
    """Say whether the environment switches VeriCache off."""
    return os.environ.get(ENV, "").strip() == OFF


def publish(config: VeriCacheConfig | None) -> None:
    """Make ``config`` the settings of this process and of those it starts.

    Args:
        config: None switches VeriCache off.
    """
    os.environ[ENV] = OFF if config is None else to_json(config)
    active_config.cache_clear()


def _fields(values: object, source: str) -> dict[str, object]:
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{source}: expected lines `field: value`, got {type(values).__name__}"
        )
    unknown = [str(name) for name in values if name not in options()]
    if unknown:
        raise ConfigError(
            f"{source}: unknown field {', '.join(map(repr, unknown))}; known: "
            f"{', '.join(options())}"
        )
    missing = [name for name, value in values.items() if value is None]
    if missing:
        raise ConfigError(
            f"{source}: {missing[0]} ({flag(missing[0])}) has no value; write one or "
            "delete the line"
        )
    return dict(values)
