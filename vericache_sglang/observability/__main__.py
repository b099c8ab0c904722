"""Print ``docs/monitoring.md``."""

from vericache_sglang.observability.table import page

if __name__ == "__main__":
    print(page(), end="")
