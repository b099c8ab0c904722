"""Settings as YAML and JSON text, and the one reader of ``VERICACHE_CONFIG``."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from vericache_sglang.config.schema import VeriCacheConfig, fields
from vericache_sglang.errors import ConfigError

ENV = "VERICACHE_CONFIG"
"""Carries the settings to SGLang's processes: a YAML path, inline JSON or ``off``."""

OFF = "off"


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses repeated keys and reads ``on`` and ``off`` as text."""

    # By first letter. YAML 1.1 reads on and off as booleans; no setting is boolean.
    yaml_implicit_resolvers = {  # noqa: RUF012  # as the base class has it
        **yaml.SafeLoader.yaml_implicit_resolvers,
        "o": [],
        "O": [],
    }

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


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file, unchecked.

    Raises:
        ConfigError: The file cannot be read, or is not YAML.
    """
    try:
        # _Loader is a SafeLoader: it builds plain data, never objects.
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}); give --vericache-config an existing "
            "YAML file"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not valid YAML: {error}") from error


def config_from(values: Any, source: str) -> VeriCacheConfig:
    """Build the settings from field values.

    Args:
        values: Field name -> value; absent fields take their default, None has none.
        source: Where the values are from, first words of any error.

    Raises:
        ConfigError: Not a mapping, or see ``VeriCacheConfig``.
    """
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{source}: expected lines `field: value`, got {type(values).__name__}"
        )
    try:
        return VeriCacheConfig(**{str(name): value for name, value in values.items()})
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
    given = config_from(flags, "command line")
    values = base.model_dump() if base is not None else {}
    return VeriCacheConfig(**{**values, **given.model_dump(exclude_unset=True)})


def to_yaml(config: VeriCacheConfig) -> str:
    """Return ``config`` as YAML, every field under a comment from the schema."""
    blocks = []
    for name, value in config.model_dump().items():
        field = fields()[name]
        notes = [field.help, field.unit, field.bounds, f"default {field.default}"]
        comment = "; ".join(note for note in notes if note)
        blocks.append(f"# {comment}\n{yaml.safe_dump({name: value})}")
    return "\n".join(blocks)


def parse_setting(value: str) -> VeriCacheConfig | None:
    """Parse a value of ``ENV``; None for "" and ``off``.

    Raises:
        ConfigError: Neither inline JSON nor a readable YAML file, or a bad field.
    """
    value = value.strip()
    if value in ("", OFF):
        return None
    if not value.startswith("{"):
        return config_from(read_yaml(Path(value)), f"{ENV}: {value}")
    try:
        return config_from(json.loads(value), ENV)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{ENV} is not valid JSON: {error}") from error


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
    """Return whether the environment switches VeriCache off."""
    return os.environ.get(ENV, "").strip() == OFF


def publish(config: VeriCacheConfig | None) -> None:
    """Make ``config`` the settings of this process and of those it starts.

    Args:
        config: None switches VeriCache off.
    """
    os.environ[ENV] = OFF if config is None else config.model_dump_json()
    active_config.cache_clear()
