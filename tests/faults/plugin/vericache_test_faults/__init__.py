"""Breaks VeriCache on purpose in a server process; one module per fault."""

import os
from importlib import import_module

ENV = "VERICACHE_TEST_FAULT"


def install():
    """Install the fault the environment names; SGLang's plugin loader calls this."""
    import_module(f"vericache_test_faults.{os.environ[ENV]}").install()
