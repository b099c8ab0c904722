"""Every setting of VeriCache: schema, flags, files."""

from vericache_sglang.config.cli import add_flags, given_values, settings_table
from vericache_sglang.config.files import (
    ENV,
    OFF,
    active_config,
    is_disabled,
    load_config,
    publish,
    read_yaml,
    to_json,
    to_yaml,
)
from vericache_sglang.config.schema import (
    VeriCacheConfig,
    boot_line,
    flag,
    options,
    resolve_host,
    resolve_staging,
)

__all__ = [
    "ENV",
    "OFF",
    "VeriCacheConfig",
    "active_config",
    "add_flags",
    "boot_line",
    "flag",
    "given_values",
    "is_disabled",
    "load_config",
    "options",
    "publish",
    "read_yaml",
    "resolve_host",
    "resolve_staging",
    "settings_table",
    "to_json",
    "to_yaml",
]
