"""Section 3 of the paper on any model: ``python -m vericache_sglang.divergence``."""

import sys

from vericache_sglang.evaluation.command import main

if __name__ == "__main__":
    sys.exit(main(["divergence", *sys.argv[1:]]))
