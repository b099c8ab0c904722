"""No fault: a CPU server captures CUDA graphs as a GPU server does, and plays them.

SGLang's graph runner and ours are the real ones; what a graph does is played. A capture
keeps the forward; a replay runs it again over the runner's static buffers, with the
attention metadata of the capture, and its result is where the capture's was.
"""

import os
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import (
    ForwardContext,
    forward_context,
    get_forward_context,
)
from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
from sglang.srt.model_executor.runner import decode_cuda_graph_runner
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_spec

from vericache_sglang.attention.cpu_backend import SlotRunAttnBackend
from vericache_sglang.attention.cuda_backend import RaggedAttnBackend
from vericache_sglang.attention.layer import BACKEND_NAME
from vericache_sglang.runtime.cuda_arguments import RAGGED_MODE

LOG = "VERICACHE_TEST_LOG"
WARM_UPS = 2
"""Forwards SGLang runs before it captures one."""


class PlayedGraphs:
    """What ``FullCudaGraphBackend`` is on a GPU."""

    def __init__(self, runner, **_):
        self._runner, self._graphs = runner, {}
        log = os.environ.get(LOG)
        self._log = open(log, "a", buffering=1) if log else None  # noqa: SIM115

    @contextmanager
    def capture_session(self, stream):
        yield

    def capture_one(self, key, forward, capture_inputs=None, post_warmup_hook=None):
        for _ in range(WARM_UPS):
            forward()
        backend = get_forward_context().attn_backend
        metadata, output = backend.forward_metadata, forward()
        self._graphs[key] = forward, backend, metadata, output
        self._note("capture", key)

    def can_run(self, forward_batch, key):
        return key in self._graphs

    @contextmanager
    def replay_session(self):
        yield

    def replay(self, key, forward_batch, **_):
        forward, backend, metadata, output = self._graphs[key]
        backend.forward_metadata = metadata
        with forward_context(ForwardContext(attn_backend=backend)):
            again = forward()
        if again.next_token_logits is not output.next_token_logits:
            output.next_token_logits.copy_(again.next_token_logits)
        self._note("replay", key)
        return output

    def _note(self, what, key):
        if self._log:
            mode = self._runner.capture_forward_mode.name
            self._log.write(f"{what} {mode} {key.size}\n")


class PlayedBackend(RaggedAttnBackend):
    """Our attention on a GPU; packed rows, for which it needs Triton, as on a CPU."""

    def __init__(self, model_runner):
        most = get_spec().speculative_num_draft_tokens or 1
        super().__init__(model_runner, SlotRunAttnBackend(model_runner), most)

    def init_forward_metadata(self, forward_batch):
        if getattr(forward_batch.spec_info, "packed", None):
            self.forward_metadata = None
            self._prefill.init_forward_metadata(forward_batch)
            return
        super().init_forward_metadata(forward_batch)

    def forward_extend(self, q, k, v, layer, forward_batch, *args, **kwargs):
        if self.forward_metadata is None:
            served = self._prefill.forward_extend
        else:
            served = super().forward_extend
        return served(q, k, v, layer, forward_batch, *args, **kwargs)


def captured(*, model_runner):
    """Capture whatever the device, as ``capture_decode_graph`` does on a GPU."""
    runner = model_runner._decode_cuda_graph_runner_cls()(model_runner)
    return cuda_graph_setup.GraphCapture(
        runner=runner, memory_phase="decode", memory_usage_gb=0, capture_time=0
    )


def install():
    """Have graphs captured and replayed; each is logged where it is asked for."""
    os.environ[RAGGED_MODE] = "compact"
    torch.cpu.is_current_stream_capturing = lambda: False
    ATTENTION_BACKENDS[BACKEND_NAME] = PlayedBackend
    type(current_platform).get_full_graph_backend_cls = lambda self: PlayedGraphs
    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
    cuda_graph_setup.capture_decode_graph = captured
    decode_cuda_graph_runner.graph_capture = lambda stream=None: nullcontext(
        SimpleNamespace(stream=stream)
    )
