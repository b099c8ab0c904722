"""What SGLang's arguments become on a GPU: its own resolution, as far as a CPU goes.

The records are SGLang's; the graph settings are parsed by it. What it would have found
out about the GPU (the attention backend, the most rows of a graph) is given.
"""

import os
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang

from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops  # noqa: E402

define_missing_ops()

from sglang.srt.arg_groups.cuda_graph_hook import (  # noqa: E402
    generate_decode_cuda_graph_batch_sizes,
    parse_cuda_graph_config,
)
from sglang.srt.arg_groups.overrides import (  # noqa: E402
    record_foreign_defaults,
    resolving_view,
)
from sglang.srt.model_executor.cuda_graph_config import Phase, with_phase  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from vericache_sglang.compression.base import Needs  # noqa: E402
from vericache_sglang.config.schema import VeriCacheConfig  # noqa: E402
from vericache_sglang.errors import UnsupportedError  # noqa: E402
from vericache_sglang.runtime import cuda_arguments  # noqa: E402
from vericache_sglang.runtime.cuda_arguments import RAGGED_MODE, settle  # noqa: E402


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop(RAGGED_MODE, None)


@pytest.fixture
def resolve(monkeypatch):
    """Return what resolves flags of a GPU server, with settings of ours."""

    def run(compressor="recency", *, found="fa3", most=256, residency="auto", **flags):
        config = VeriCacheConfig(compressor=compressor, residency=residency)
        monkeypatch.setattr(cuda_arguments, "active_config", lambda: config)
        args = ServerArgs(model_path="dummy", device="cuda", **flags)
        args._raw_input = dict(flags)
        parse_cuda_graph_config(args)
        view = resolving_view(args)

        def resolved_so_far(recorder):
            if recorder.attention_backend is None:
                recorder.attention_backend = found
            graphs = recorder.cuda_graph_config
            if graphs.decode.max_bs is None:
                graphs = with_phase(graphs, Phase.DECODE, max_bs=most)
            recorder.cuda_graph_config = graphs

        record_foreign_defaults(args, "sglang", resolved_so_far)
        record_foreign_defaults(args, "vericache", settle)
        return view

    return run


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ("fa3", "fa3"),
        ("trtllm_mha", "trtllm_mha"),
        ("flashinfer", "vericache"),
        ("triton", "vericache"),
    ],
)
def test_sglangs_choice_stays_where_it_serves_ragged_rows(resolve, found, chosen):
    assert resolve(found=found).attention_backend == chosen


@pytest.mark.parametrize("asked", ["vericache", "fa3", "flashinfer"])
def test_the_users_choice_is_not_changed(resolve, asked):
    assert resolve(found="fa3", attention_backend=asked).attention_backend == asked


def test_codes_are_read_by_our_backend(resolve):
    assert resolve("kivi").attention_backend == "vericache"
    given = resolve("split-planes", attention_backend="vericache")
    assert given.attention_backend == "vericache"
    with pytest.raises(UnsupportedError, match=r"fa3: .*--vericache-compressor kivi"):
        resolve("recency+kivi", attention_backend="fa3")


@pytest.mark.parametrize("codec", ["kivi", "split-planes", "turboquant"])
def test_no_codec_is_refused_for_being_on_a_gpu(resolve, codec):
    assert resolve(codec).attention_backend == "vericache"


def plain_sizes(most):
    """Return the batch sizes a server without speculation captures."""
    args = ServerArgs(model_path="dummy", device="cuda")
    return generate_decode_cuda_graph_batch_sizes(args, most)


def test_decodes_have_the_graphs_of_a_server_without_speculation(resolve):
    decode = resolve().cuda_graph_config.decode
    assert decode.bs == plain_sizes(64)
    assert decode.max_bs == 64
    assert os.environ[RAGGED_MODE] == "compact"
    assert resolve(max_running_requests=9).cuda_graph_config.decode.bs[-1] == 9
    assert resolve(max_running_requests=900).cuda_graph_config.decode.bs[-1] == 256
    limited = resolve(cuda_graph_max_bs_decode=20).cuda_graph_config.decode
    assert limited.bs[-1] == limited.max_bs == 20


def test_requests_are_limited_where_the_user_does_not(resolve):
    assert resolve().max_running_requests == cuda_arguments.DEFAULT_RUNNING == 64
    assert resolve(max_running_requests=900).max_running_requests == 900


def test_sizes_the_user_gave_are_kept(resolve):
    assert resolve(cuda_graph_bs_decode=[3, 7]).cuda_graph_config.decode.bs == [3, 7]


def test_another_mode_of_ragged_graphs_is_refused(resolve):
    os.environ[RAGGED_MODE] = "static"
    with pytest.raises(UnsupportedError, match=f"{RAGGED_MODE}=static: .* compact"):
        resolve()
    resolve(disable_cuda_graph=True)


def test_without_graphs_nothing_is_captured_by_tokens(resolve):
    graphs = resolve(disable_cuda_graph=True).cuda_graph_config
    assert graphs.decode.backend == graphs.prefill.backend == "disabled"
    assert RAGGED_MODE not in os.environ


@pytest.mark.parametrize(
    ("needs", "prefill", "decode"),
    [
        ({}, True, True),
        ({"q_tail": 32}, False, True),
        ({"q_stream": True}, False, True),
        ({"probes": True}, False, True),
        ({"hidden": True}, False, False),
    ],
)
def test_what_a_compressor_looks_at_runs_outside_graphs(
    resolve, monkeypatch, needs, prefill, decode
):
    selector = SimpleNamespace(needs=Needs(**needs))
    compressor = SimpleNamespace(selector=selector, codec=None)
    monkeypatch.setattr(cuda_arguments, "create_compressor", lambda *_: compressor)
    graphs = resolve().cuda_graph_config
    assert (graphs.prefill.backend != "disabled") is prefill
    assert (graphs.decode.backend != "disabled") is decode


@pytest.mark.parametrize(
    ("found", "given", "graphs"),
    [
        ("fa3", {}, True),
        ("flashinfer", {}, False),
        ("fa3", {"attention_backend": "vericache"}, False),
        ("fa3", {"prefill_attention_backend": "vericache"}, False),
    ],
)
def test_prefill_with_our_backend_runs_outside_graphs(
    resolve, caplog, found, given, graphs
):
    """The compressor looks at no queries, so nothing else speaks against them."""
    phase = resolve(found=found, **given).cuda_graph_config.prefill
    assert (phase.backend != "disabled") is graphs
    said = [line for line in caplog.messages if "no CUDA graphs of prefill" in line]
    assert len(said) == (not graphs)


def test_lora_runs_without_graphs_of_mixed_batches(resolve):
    graphs = resolve(enable_lora=True).cuda_graph_config
    assert graphs.decode.backend == "disabled"
    assert graphs.prefill.backend != "disabled"


def test_what_was_settled_is_what_refusals_look_at(monkeypatch):
    from vericache_sglang.runtime.algorithm import VeriCacheAlgorithm

    seen = []

    class Algorithm(VeriCacheAlgorithm):
        most_drafts = 6

        @staticmethod
        def refuse(args):
            seen.append(args.attention_backend)

    def choose(args):
        args.attention_backend = "ours"

    monkeypatch.setattr(cuda_arguments, "settle", choose)
    for device in ("cuda:0", "cpu"):
        args = SimpleNamespace(
            device=device,
            disable_radix_cache=False,
            attention_backend="theirs",
            disaggregation_mode="null",
        )
        Algorithm("X", None).handle_server_args(args)
        assert args.speculative_num_draft_tokens == 7
    assert seen == ["ours", "theirs"]


def test_the_relay_takes_nothing_and_waits_for_no_lengths():
    import torch

    from vericache_sglang.runtime.algorithm import VeriCacheAlgorithm

    pool = SimpleNamespace(req_to_token=torch.zeros(5, 2))
    algorithm = VeriCacheAlgorithm("X", None)
    relay = algorithm.create_future_map("cpu", pool, needs_cpu_seq_lens=True)
    assert not relay.needs_cpu_seq_lens
    before = relay.output_tokens_buf.clone()
    relay.stash(torch.tensor([1, 2]), SimpleNamespace(bonus_tokens=torch.ones(2)))
    assert torch.equal(relay.output_tokens_buf, before)
    assert algorithm.supports_ragged_verify()


def test_a_gpu_server_says_how_little_was_tried(resolve, caplog):
    resolve()
    assert cuda_arguments.UNTRIED in caplog.messages


@pytest.mark.parametrize(
    ("residency", "deterministic", "warned"),
    [("host", True, True), ("host", False, False), ("auto", True, False)],
)
def test_kv_in_another_order_is_told(resolve, caplog, residency, deterministic, warned):
    resolve(residency=residency, enable_deterministic_inference=deterministic)
    assert (cuda_arguments.REORDERED in caplog.messages) is warned
