"""Start a server: ``python -m vericache_sglang.launch_server --model-path ...``."""

import sys

from vericache_sglang.serving.launch import main

if __name__ == "__main__":
    sys.exit(main())
