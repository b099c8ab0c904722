"""Print the settings table that the README holds."""

from vericache_sglang.config.cli import settings_table

if __name__ == "__main__":
    print(settings_table())
