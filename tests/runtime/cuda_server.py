"""SGLang's own resolution of the arguments of a GPU server, on a machine without one.

What SGLang would ask the device is given: its memory, and what kind it is. Of our
plugin only the names are registered: its hooks would stay for other tests.
"""

import json
import os
from contextlib import ExitStack, contextmanager
from unittest import mock

from sglang.srt import runtime_context
from sglang.srt.arg_groups import memory_hook
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_registry import get_spec

from vericache_sglang import plugin
from vericache_sglang.attention import registry as attention_backends
from vericache_sglang.config.schema import VeriCacheConfig
from vericache_sglang.planning.models import CATALOGUE
from vericache_sglang.prefix_cache import tiered_cache

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def model_folder(folder, name, changes):
    """Write the config.json of a catalogued model; there are no weights."""
    kind = name.partition("-")[0]
    kind = kind if kind in ARCHITECTURES else "llama"
    fields = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(fields | dict(CATALOGUE[name]) | changes)
    )
    return str(folder)


@contextmanager
def gpu(mib):
    """Have SGLang see one GPU of ``mib`` MiB, not a CPU."""
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.dict(os.environ))  # resolution sets variables
        facts = {"is_cuda": True, "is_sm100": False, "device_sm": 90}
        enter(runtime_context.override_platform(**facts))
        capacity = mock.Mock(return_value=mib)
        enter(mock.patch.object(memory_hook, "get_device_memory_capacity", capacity))
        yield


def resolved(folder, name, mib, *, changes=None, **flags):
    """Return SGLang's record and the view of its resolved arguments.

    Args:
        folder: Where to write the model's config.
        name: Of the catalogue.
        mib: Memory of the GPU, in MiB.
        changes: Fields of the model's config.json.
        flags: Fields the user sets.
    """
    attention_backends.register()
    tiered_cache.register()
    if get_spec("VERICACHE") is None:
        plugin._register_algorithm(VeriCacheConfig())
    given = {
        "device": "cuda",
        "attention_backend": "fa3",
        "speculative_algorithm": "VERICACHE",
        "cuda_graph_backend_prefill": "breakable",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
    }
    path = model_folder(folder, name, changes or {})
    args = ServerArgs(model_path=path, **(given | flags))
    with gpu(mib):
        args.resolve_once()
    return args, resolving_view(args)
