"""SGLang's own acceptance figures, from its own code, count verifications."""

import logging
import re
from array import array
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_patches.managers_batch_result import process_batch_result_decode
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
            reqs=self.requests,
            forward_iter=None,
            has_grammar=False,
            spec_algorithm=upstream.algorithm,
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

    def run(self, emitted, plain=False, due=False):
        """Process an iteration in which each request emits so many tokens.

        Args:
            emitted: Tokens by request.
            plain: All of them emitted one, decoding autoregressively.
            due: SGLang reports in this iteration.

        Returns:
            (acceptance length, rate) as reported; None where no report is due.
        """
        upstream = self._upstream
        result = upstream.Result(
            next_token_ids=torch.arange(len(emitted) * (LONGEST + 1)),
            accept_lens=torch.tensor(emitted, dtype=torch.int32),
            speculative_num_draft_tokens=LONGEST + 1,
            num_non_draft_tokens_per_req=1 if plain else 0,
        )
        self.reporter.forward_ct_decode = 0 if due else 1
        with logged(self._upstream.Reporter.__module__) as lines:
            process_batch_result_decode(
                self.original, self._processor, self._batch, result
            )
        if not due:
            assert lines == []
            return None
        (line,) = lines
        found = re.search(r"accept len: ([\d.]+), accept rate: ([\d.]+)", line)
        return tuple(map(float, found.groups()))

    def original(self, processor, batch, result):
        """Do what of SGLang's method concerns figures, by its own code."""
        upstream, emitted = self._upstream, result.accept_lens.tolist()
        tokens = upstream.Processor._resolve_spec_v2_tokens(processor, result, batch)
        assert [len(each) for each in tokens] == emitted
        generated = result.get_num_generated_tokens(len(emitted))
        processor.metrics_reporter.update_spec_metrics(
            len(emitted), result.num_correct_drafts, num_accept_tokens=generated
        )
        upstream.Reporter.report_decode_stats(processor.metrics_reporter, False)

    def report(self):
        """Report in an iteration in which every request drafts."""
        return self.run([0] * len(self.requests), due=True)


@contextmanager
def logged(name):
    """Collect the messages of a logger."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    level, logger.level = logger.level, logging.INFO
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.level = level


iterations = st.lists(
    st.one_of(
        st.just("plain"),
        st.just("report"),
        st.lists(st.integers(0, LONGEST + 1), min_size=3, max_size=3),
    ).flatmap(lambda step: st.tuples(st.just(step), st.booleans())),
    max_size=20,
)


@given(history=iterations)
@settings(deadline=None)
def test_figures_are_those_of_the_requests(upstream, history):
    """Totals equal the sum over requests, whenever the reports are made."""
    rounds = Rounds(upstream)
    tokens = verifications = 0
    reported = []
    for step, due in [*history, ("report", True)]:
        if step == "report":
            reported.append(rounds.report())
            continue
        emitted = [1, 1, 1] if step == "plain" else step
        told = rounds.run(emitted, plain=step == "plain", due=due)
        reported += [told] if due else []
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
    reporter = Rounds(upstream, 2).reporter
    reporter.forward_ct_decode = 0
    with pytest.raises(ZeroDivisionError):
        upstream.Reporter.report_decode_stats(reporter, False)


def test_between_two_reports_nothing_is_lost(upstream):
    """SGLang calls the method every iteration; most calls report nothing."""
    rounds = Rounds(upstream, 2)
    for emitted in ([0, 0], [3, 0], [0, 0], [0, 2]):
        rounds.run(emitted)
    assert rounds.report() == (2.5, 0.19)


def test_a_request_that_ended_or_was_retracted_is_not_corrected(upstream):
    rounds = Rounds(upstream, 2)
    rounds.requests[0].is_retracted = True
    rounds.run([0, 3])
    told = [
        (req.spec_verify_ct, req.spec_num_correct_drafts) for req in rounds.requests
    ]
    assert told == [(0, 0), (1, 2)]
