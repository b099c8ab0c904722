"""SGLang's own acceptance figures, from its own code, count verifications."""

import logging
import re
from array import array
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_patches.managers_batch_result import resolve_spec_v2_tokens
from vericache_patches.managers_metrics_reporter import report_decode_stats
from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang

MODEL = Path(__file__).parents[2] / "configs" / "demo-model"
LONGEST = 8


@pytest.fixture(scope="module")
def upstream():
    """Publish SGLang's configuration; return its classes; put all back."""
    define_missing_ops()
    from sglang.srt import runtime_context
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler_components import (
        batch_result_processor,
        metrics_reporter,
    )
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.observability.metrics_collector import (
        SchedulerMetricsCollectorContext,
    )
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    before = runtime_context.snapshot_context()
    args = ServerArgs(
        model_path=str(MODEL), device="cpu", attention_backend="torch_native"
    )
    context = runtime_context.publish(args, role="scheduler")
    context.override("test", speculative_num_draft_tokens=LONGEST + 1)
    yield SimpleNamespace(
        Req=Req,
        params=SamplingParams(temperature=0.0),
        Reporter=metrics_reporter.SchedulerMetricsReporter,
        Processor=batch_result_processor.SchedulerBatchResultProcessor,
        Result=GenerationBatchResult,
        Context=SchedulerMetricsCollectorContext,
        algorithm=SpeculativeAlgorithm.EAGLE,
        mode=DisaggregationMode.NULL,
    )
    runtime_context.restore_context(before)


class Rounds:
    """Iterations of a batch of requests through SGLang's processor and reporter."""

    def __init__(self, upstream, requests=3):
        self._upstream = upstream
        self.requests = [
            upstream.Req(f"r{i}", None, array("q", [1, 2]), upstream.params)
            for i in range(requests)
        ]
        self._batch = SimpleNamespace(
            reqs=self.requests, forward_iter=None, has_grammar=False
        )
        pool = SimpleNamespace(get_decode_usage_msg_parts=list)
        scheduler = SimpleNamespace(
            device="cpu",
            draft_worker=None,
            disaggregation_mode=upstream.mode,
            forward_ct=0,
            running_batch=self._batch,
            spec_algorithm=upstream.algorithm,
            waiting_queue=[],
            pool_stats_observer=SimpleNamespace(get_pool_stats=lambda: pool),
            kv_events_publisher=SimpleNamespace(publish_kv_events=lambda: None),
        )
        self.reporter = upstream.Reporter(
            scheduler=scheduler,
            metrics_collector_context=upstream.Context(
                enable_metrics=False,
                is_stats_logging_rank=True,
                current_scheduler_metrics_enabled=False,
                enable_kv_cache_events=False,
                collector=None,
            ),
            metrics_collector=None,
        )
        given = dict.fromkeys(field.name for field in fields(upstream.Processor))
        given["metrics_reporter"] = self.reporter
        worker = SimpleNamespace(on_verify_complete_cpu=lambda *_, **__: None)
        self._processor = upstream.Processor(**{**given, "model_worker": worker})

    def run(self, emitted, plain=False):
        """Process an iteration in which each request emits so many tokens."""
        upstream = self._upstream
        result = upstream.Result(
            next_token_ids=torch.arange(len(emitted) * (LONGEST + 1)),
            accept_lens=torch.tensor(emitted, dtype=torch.int32),
            speculative_num_draft_tokens=LONGEST + 1,
            num_non_draft_tokens_per_req=1 if plain else 0,
        )
        tokens = resolve_spec_v2_tokens(
            upstream.Processor._resolve_spec_v2_tokens,
            self._processor,
            result,
            self._batch,
        )
        assert [len(each) for each in tokens] == list(emitted)
        generated = result.get_num_generated_tokens(len(emitted))
        self.reporter.update_spec_metrics(
            len(emitted), result.num_correct_drafts, num_accept_tokens=generated
        )

    def report(self, due=True):
        """Report as in an iteration that is due or not; return (length, rate)."""
        self.reporter.forward_ct_decode = 0 if due else 1
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logger = logging.getLogger(self._upstream.Reporter.__module__)
        logger.addHandler(handler)
        level, logger.level = logger.level, logging.INFO
        try:
            report_decode_stats(
                self._upstream.Reporter.report_decode_stats, self.reporter, False
            )
        finally:
            logger.removeHandler(handler)
            logger.level = level
        if not due:
            assert lines == []
            return None
        (line,) = lines
        found = re.search(r"accept len: ([\d.]+), accept rate: ([\d.]+)", line)
        return tuple(map(float, found.groups()))


iterations = st.lists(
    st.one_of(
        st.just("plain"),
        st.just("report"),
        st.lists(st.integers(0, LONGEST + 1), min_size=3, max_size=3),
    ),
    max_size=20,
)


@given(history=iterations)
@settings(deadline=None)
def test_figures_are_those_of_the_requests(upstream, history):
    """Totals equal the sum over requests, whenever the reports are made."""
    rounds = Rounds(upstream)
    tokens = verifications = 0
    reported = []
    for step in [*history, "report"]:
        if step == "report":
            reported.append(rounds.report())
            continue
        emitted = [1, 1, 1] if step == "plain" else step
        rounds.run(emitted, plain=step == "plain")
        tokens += sum(emitted)
        verifications += sum(n > 0 for n in emitted)
    reporter, requests = rounds.reporter, rounds.requests
    assert reporter.spec_total_num_forward_ct == verifications
    assert reporter.spec_total_num_accept_tokens == tokens
    assert sum(req.spec_verify_ct for req in requests) == verifications
    correct = sum(req.spec_num_correct_drafts for req in requests)
    assert correct == tokens - verifications
    for req in requests:
        counts = enumerate(req.spec_correct_drafts_histogram)
        assert sum(n * times for n, times in counts) == req.spec_num_correct_drafts
        assert sum(req.spec_correct_drafts_histogram) == req.spec_verify_ct
    for length, rate in reported:
        assert length == 0 or 1 <= length <= LONGEST + 1
        # SGLang's log has two digits.
        assert rate == pytest.approx(max(0, length - 1) / LONGEST, abs=0.0071)


def test_an_interval_of_drafting_repeats_the_last_figures(upstream):
    rounds = Rounds(upstream, 2)
    assert rounds.report() == (0, 0)
    rounds.run([0, 0])
    assert rounds.report() == (0, 0)
    rounds.run([5, 0])
    assert rounds.report() == (5, 4 / LONGEST)
    for _ in range(3):
        rounds.run([0, 0])
    assert rounds.report() == (5, 4 / LONGEST)
    assert rounds.reporter.spec_total_num_accept_tokens == 5
    assert rounds.reporter.spec_total_num_forward_ct == 1


def test_without_the_hook_an_interval_of_drafting_divides_by_zero(upstream):
    rounds = Rounds(upstream, 2)
    rounds.run([0, 0])
    rounds.reporter.forward_ct_decode = 0
    with pytest.raises(ZeroDivisionError):
        upstream.Reporter.report_decode_stats(rounds.reporter, False)


def test_between_two_reports_nothing_is_lost(upstream):
    """SGLang calls the method every iteration; most calls report nothing."""
    rounds = Rounds(upstream, 2)
    for emitted in ([0, 0], [3, 0], [0, 0], [0, 2]):
        rounds.run(emitted)
        rounds.report(due=False)
    assert rounds.report() == (2.5, 0.19)
