"""Data sets for load generators: ``python -m vericache_sglang.workload``."""

import sys

from vericache_sglang.evaluation.export import main

if __name__ == "__main__":
    sys.exit(main())
