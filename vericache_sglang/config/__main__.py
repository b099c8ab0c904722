"""Print ``docs/settings.md``."""

from vericache_sglang.config.cli import settings_page

if __name__ == "__main__":
    print(settings_page(), end="")
