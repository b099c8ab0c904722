"""SGLang's acceptance figures count verifications, not iterations."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_patches.managers_batch_result import resolve_spec_v2_tokens
from vericache_patches.managers_metrics_reporter import (
    COUNTS,
    TOTALS,
    report_decode_stats,
)

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang

LONGEST = 8


class Reporter:
    """Counts and reports as ``SchedulerMetricsReporter`` does in SGLang 0.5.21."""

    def __init__(self, update):
        for name in (*COUNTS, *TOTALS):
            setattr(self, name, 0)
        self.reports = []
        self._update = update

    def update(self, rows, result):
        generated = (
            result.num_correct_drafts + rows * result.num_non_draft_tokens_per_req
        )
        self.spec_num_block_accept_tokens = self.spec_num_cap_tokens = 0
        self._update(self, rows, result.num_correct_drafts, num_accept_tokens=generated)

    def report(self):
        length = self.spec_num_accept_tokens / self.spec_num_forward_ct
        rate = self.spec_num_correct_drafts / (self.spec_num_forward_ct * LONGEST)
        self.reports.append((length, rate))
        self.spec_total_num_accept_tokens += self.spec_num_accept_tokens
        self.spec_total_num_forward_ct += self.spec_num_forward_ct
        for name in COUNTS:
            setattr(self, name, 0)


@pytest.fixture(scope="module")
def update():
    """Return SGLang's own method that counts."""
    from sglang.srt.managers.scheduler_components import metrics_reporter

    return metrics_reporter.SchedulerMetricsReporter.update_spec_metrics


class Request:
    """What the hook touches of a request."""

    def __init__(self):
        self.is_retracted = False
        self.spec_verify_ct = 0
        self.spec_num_correct_drafts = 0
        self.spec_correct_drafts_histogram = [0] * (LONGEST + 2)

    def finished(self):
        return False


def upstream_resolve(processor, result, batch):
    """Count every row as a verification, as SGLang does."""
    counts = [n - result.num_non_draft_tokens_per_req for n in result.accept_lens]
    result.num_correct_drafts_per_req_cpu = counts
    result.num_correct_drafts = sum(counts)
    for req, count in zip(batch.reqs, counts, strict=True):
        req.spec_verify_ct += 1
        req.spec_num_correct_drafts += count
        req.spec_correct_drafts_histogram[count] += 1
    return [[7] * n for n in result.accept_lens]


def run(reporter, requests, emitted, plain=False):
    """Process one iteration in which each request emits so many tokens."""
    batch = SimpleNamespace(reqs=requests)
    result = SimpleNamespace(
        accept_lens=emitted, num_non_draft_tokens_per_req=1 if plain else 0
    )
    processor = SimpleNamespace(metrics_reporter=reporter)
    resolve_spec_v2_tokens(upstream_resolve, processor, result, batch)
    reporter.update(len(requests), result)


def report(reporter):
    report_decode_stats(lambda self, *args: self.report(), reporter, True)
    return reporter.reports[-1]


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
def test_figures_are_those_of_the_requests(update, history):
    """Totals equal the sum over requests, whenever the reports are made."""
    reporter, requests = Reporter(update), [Request() for _ in range(3)]
    tokens = rounds = 0
    for step in history:
        if step == "report":
            report(reporter)
            continue
        emitted = [1, 1, 1] if step == "plain" else step
        run(reporter, requests, emitted, plain=step == "plain")
        tokens += sum(emitted)
        rounds += sum(n > 0 for n in emitted)
    report(reporter)
    assert reporter.spec_total_num_forward_ct == rounds
    assert reporter.spec_total_num_accept_tokens == tokens
    assert sum(req.spec_verify_ct for req in requests) == rounds
    correct = sum(req.spec_num_correct_drafts for req in requests)
    assert correct == tokens - rounds
    for length, rate in reporter.reports:
        assert length == 0 or 1 <= length <= LONGEST + 1
        assert rate == pytest.approx(max(0, length - 1) / LONGEST)


def test_an_interval_of_drafting_repeats_the_last_figures(update):
    reporter, requests = Reporter(update), [Request(), Request()]
    assert report(reporter) == (0, 0)
    run(reporter, requests, [0, 0])
    assert report(reporter) == (0, 0)
    run(reporter, requests, [5, 0])
    assert report(reporter) == (5, 4 / LONGEST)
    for _ in range(3):
        run(reporter, requests, [0, 0])
    assert report(reporter) == (5, 4 / LONGEST)
    assert reporter.spec_total_num_accept_tokens == 5
    assert reporter.spec_total_num_forward_ct == 1


def test_between_two_reports_nothing_is_lost(update):
    """SGLang calls the method every iteration; most calls report nothing."""
    reporter, requests = Reporter(update), [Request(), Request()]
    for emitted in ([0, 0], [3, 0], [0, 0], [0, 2]):
        run(reporter, requests, emitted)
        report_decode_stats(lambda self: None, reporter)
    assert report(reporter) == (2.5, 1.5 / LONGEST)
