"""Compare systems on one list of requests: ``python -m vericache_sglang.bench``."""

import sys

from vericache_sglang.evaluation.command import main

if __name__ == "__main__":
    sys.exit(main())
