"""What VeriCache does to objects of SGLang besides hooks, and relies on in its source.

``HOOKS`` of the sibling modules and of the CPU platform list the hooks.
"""

from __future__ import annotations

from dataclasses import dataclass

from vericache_patches.record import Symbol

REQ = "sglang.srt.managers.schedule_batch.Req"
KV = "sglang.srt.managers.schedule_batch.ReqKvInfo"
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
REPORTER = (
    "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"
)
TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
SCHEDULING = "SGLang lets a spec worker say what its requests need next."


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Attributes of one class of SGLang that VeriCache sets on its objects.

    Attributes:
        owner: Dotted path of the class.
        names: Attributes; those that begin with ``vericache`` are ours, the others are
            SGLang's own.
        files: Files that set them, by their names.
        reason: What SGLang, or a hook, does with the value.
        remove_when: The upstream change after which nothing sets them.
    """

    owner: str
    names: tuple[str, ...]
    files: tuple[str, ...]
    reason: str
    remove_when: str


WRITES: tuple[Write, ...] = (
    Write(
        owner=REQ,
        names=("vericache_room", "vericache_swapped_slots"),
        files=("hosting.py", "placement.py", "worker.py"),
        reason="Hooks read the slots a request uses before its next allocation, and "
        "those it needs to be swapped in.",
        remove_when=SCHEDULING,
    ),
    Write(
        owner=REQ,
        names=(
            *("vericache_lost", "vericache_kept"),
            *("vericache_distrusted", "vericache_errors"),
        ),
        files=(
            *("hosting.py", "recovery.py", "request.py", "worker.py"),
            "managers_scheduler_retraction.py",
        ),
        reason="A request that lost its KV, or leaves it to the prefix cache, is "
        "prefilled again by the hook on update_running_batch; the marks outlast our "
        "own record of it.",
        remove_when="SGLang lets a worker retract a request.",
    ),
    Write(
        owner="sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend",
        names=("speculative_num_draft_tokens",),
        files=("graphs.py",),
        reason="While a graph is captured it bounds the rows' queries, by which the "
        "kernel chooses its tile.",
        remove_when="SGLang bounds the rows of a ragged graph by the graph's tokens.",
    ),
    Write(
        owner="sglang.srt.disaggregation.decode.DecodePreallocQueue",
        names=(
            *("pd_rebootstrap_forced_output_id", "pd_rebootstrap_in_progress"),
            "bootstrap_room",
        ),
        files=("disaggregation_decode.py",),
        reason="On its requests, the first two as it does itself: their KV is sent "
        "again, and the last token they had is not sampled a second time.",
        remove_when="SGLang asks the algorithm which requests start again.",
    ),
    Write(
        owner=REQ,
        names=("is_retracted",),
        files=("worker.py",),
        reason="After an error of a rank no rank prefills: SGLang ignores results of "
        "these requests, which go back to the queue.",
        remove_when="SGLang lets a worker retract a request.",
    ),
    Write(
        owner=REQ,
        names=("vericache_path", "vericache_guest"),
        files=("relay.py", "hosting.py"),
        reason="The hook on the streamer counts tokens of requests that a verifier "
        "decodes, and streams nothing of a guest.",
        remove_when="SGLang lets a worker say how a request is streamed.",
    ),
    Write(
        owner=REQ,
        names=("vericache_known",),
        files=("known_tokens.py",),
        reason="A request that another server has decoded in part goes on from there.",
        remove_when="SGLang can prefill a request with its next token known.",
    ),
    Write(
        owner=REQ,
        names=("vericache_grammar_ended",),
        files=("grammar.py",),
        reason="The hook on update_finish_state reads whether a grammar had ended "
        "before the last tokens.",
        remove_when="SGLang looks at a spec worker's tokens in the order of others.",
    ),
    Write(
        owner=REQ,
        names=("vericache_names",),
        files=("tiered_cache.py",),
        reason="The names of a prompt's segments are hashed once.",
        remove_when="SGLang names the blocks of a prompt for its cache.",
    ),
    Write(
        owner=REQ,
        names=("customized_info",),
        files=("arrival.py", "relay.py"),
        reason="Carries the statistics of a request to meta_info; made for workers.",
        remove_when="SGLang takes per-request values from a spec worker.",
    ),
    Write(
        owner=REQ,
        names=("skip_radix_cache_insert",),
        files=(
            *("compress.py", "early_segments.py", "moves.py", "recovery.py"),
            "worker.py",
        ),
        reason="A row that does not list a request's full KV must not be cached.",
        remove_when="SGLang asks a spec worker whether a row may be cached.",
    ),
    Write(
        owner=REQ,
        names=("last_node", "lock_receipt", "prefix_indices"),
        files=(
            *("early_segments.py", "early_starts.py", "row_edit.py"),
            "tiered_cache.py",
        ),
        reason="A compressed request no longer lists slots of the tree, so it releases "
        "its lock; a cached chunk's slots are those of its row.",
        remove_when="SGLang lets a worker take over the slots of a request.",
    ),
    Write(
        owner=REQ,
        names=("to_finish",),
        files=("recovery.py",),
        reason="A request whose KV is lost again and again ends with an error.",
        remove_when="SGLang lets a worker abort a request.",
    ),
    Write(
        owner=KV,
        names=("kv_committed_len", "kv_allocated_len", "cache_protected_len"),
        files=(
            *("compress.py", "departure.py", "early_segments.py", "moves.py"),
            "row_edit.py",
        ),
        reason="They are the lengths of a row, which compressing shortens; SGLang "
        "frees, counts and allocates by them.",
        remove_when="SGLang lets a worker replace the slots of a row.",
    ),
    Write(
        owner=REQ,
        names=("cached_tokens", "cached_tokens_storage"),
        files=("early_starts.py",),
        reason="A request that starts on stored draft KV has no prefill that counts.",
        remove_when="SGLang lets a worker start a request without a prefill.",
    ),
    Write(
        owner="sglang.srt.managers.scheduler.Scheduler",
        names=("running_batch",),
        files=("early_starts.py",),
        reason="Such a request runs at once where no other does.",
        remove_when="SGLang lets a worker start a request without a prefill.",
    ),
    Write(
        owner="sglang.srt.managers.schedule_batch.ScheduleBatch",
        names=("batch_is_full",),
        files=("iteration.py",),
        reason="A move has freed slots: SGLang tries admission again.",
        remove_when=SCHEDULING,
    ),
    Write(
        owner="sglang.srt.managers.scheduler.Scheduler",
        names=("chunked_req", "last_batch"),
        files=("worker.py",),
        reason="After an error every running request returns to the queue: none is "
        "being prefilled any more.",
        remove_when="SGLang lets a worker retract every request.",
    ),
    Write(
        owner=RUNNER,
        names=("shared_read_done_event",),
        files=("iteration.py",),
        reason="Moves edit rows after the event at which SGLang considers them read; "
        "without it the scheduler's stream waits for all that was launched.",
        remove_when="SGLang takes that event from the worker's result.",
    ),
    Write(
        owner=RUNNER,
        names=("spec_algorithm",),
        files=("graphs.py",),
        reason="Set to NONE while graphs of one token per row are captured.",
        remove_when="SGLang captures decode graphs beside those of verifications.",
    ),
    Write(
        owner="sglang.srt.layers.radix_attention.RadixAttention",
        names=("forward",),
        files=("prefill_observer.py",),
        reason="Layers that a selector asks about show queries and keys first.",
        remove_when="SGLang lets a worker observe a layer's queries.",
    ),
    Write(
        owner="sglang.srt.managers.io_struct.GenerateReqInput",
        names=("vericache_check",),
        files=("plugin.py",),
        reason="The hook on its normalization calls it.",
        remove_when="SGLang lets a plugin check a request.",
    ),
    Write(
        owner=TOKENIZER,
        names=("vericache_check", "vericache_finished"),
        files=("plugin.py", "http_server.py"),
        reason="Hooks call them for every request, and for every answer.",
        remove_when="SGLang lets a plugin check a request and see its answer.",
    ),
    Write(
        owner=REQ,
        names=(
            *("grammar", "finished_len", "reasoning_tokens", "finished_output"),
            *("spec_verify_ct", "spec_num_correct_drafts", "decode_batch_idx", "rid"),
        ),
        files=(
            *("managers_schedule_batch.py", "acceptance_counts.py"),
            "managers_output_streamer.py",
            *("speculative_eagle_utils.py", "managers_scheduler_abort.py"),
        ),
        reason="Hooks correct figures, or hide a value while the original runs.",
        remove_when="The hooks go.",
    ),
    Write(
        owner="sglang.srt.sampling.sampling_params.SamplingParams",
        names=("stream_interval",),
        files=("managers_output_streamer.py",),
        reason="Set to 1 while the original decides whether a request is streamed.",
        remove_when="The hook goes.",
    ),
    Write(
        owner=REPORTER,
        names=(
            *("vericache_interval", "spec_num_accept_tokens"),
            *("spec_num_correct_drafts", "spec_num_forward_ct"),
            *("spec_total_num_accept_tokens", "spec_total_num_forward_ct"),
        ),
        files=("acceptance_counts.py",),
        reason="Counts verifications only; an interval without one repeats the last.",
        remove_when="The hook goes.",
    ),
    Write(
        owner=RUNNER,
        names=("page_size", "req_to_token_pool", "token_to_kv_pool"),
        files=("draft_model.py",),
        reason="A small model's KV is a ring per request, which no allocator sees.",
        remove_when="SGLang's runner takes pools that a spec worker has made.",
    ),
    Write(
        owner="sglang.srt.entrypoints.openai.protocol.UsageInfo",
        names=("vericache",),
        files=("entrypoints_openai_usage_processor.py",),
        reason="Shows statistics of a request; its class is opened to further fields.",
        remove_when="SGLang takes per-request values from a spec worker.",
    ),
)
"""Every attribute that is set; a test finds those that are missing."""

POSES: dict[str, str] = {
    "SpecInputType.NGRAM_VERIFY": "VeriCacheSpecInput (spec_input.py): the enum cannot "
    "be extended, and this member has the fewest special cases."
}
"""SGLang's name under which something of ours passes -> what, and why that one."""

RESULTS = (
    "sglang.srt.managers.scheduler_components.batch_result_processor."
    "SchedulerBatchResultProcessor"
)
COUNTED = "acceptance_counts.py subtracts beforehand what it will count."
COUNTED_UNTIL = "SGLang accepts results in which some requests emit nothing."
RELAY = "sglang.srt.managers.overlap_utils.FutureMap"

RELIED: tuple[Symbol, ...] = (
    Symbol(
        target="sglang.srt.layers.radix_attention.RadixAttention.forward",
        args=(
            *("self", "q", "k", "v", "forward_batch", "save_kv_cache"),
            *("key_value_num_tokens", "**kwargs"),
        ),
        reason="Wrapped in observed layers, which get all rows of q and k.",
        remove_when="SGLang lets a worker observe a layer's queries.",
        body="3b8027570254",
    ),
    Symbol(
        target=f"{RESULTS}._resolve_spec_v2_tokens",
        args=("self", "result", "batch"),
        reason=COUNTED,
        remove_when=COUNTED_UNTIL,
        body="2502e7dfb783",
    ),
    Symbol(
        target=f"{REPORTER}.update_spec_metrics",
        args=(
            *("self", "bs", "num_correct_drafts", "num_accept_tokens"),
            *("num_block_accept_tokens", "num_cap_tokens"),
        ),
        reason=COUNTED,
        remove_when=COUNTED_UNTIL,
        body="c964d99ac291",
    ),
    Symbol(
        target=f"{REPORTER}.report_decode_stats",
        args=("self", "can_run_cuda_graph", "running_batch", "num_generated_tokens"),
        reason="acceptance_counts.py sees by the counters whether it reported.",
        remove_when=COUNTED_UNTIL,
        body="e31099fa84b1",
    ),
    Symbol(
        target="sglang.srt.disaggregation.decode_schedule_batch_mixin."
        "ScheduleBatchDisaggregationDecodeMixin.prepare_for_prebuilt",
        args=("self",),
        reason="early_starts.py has it build the batch of a request without a prefill, "
        "outside of a decode server, and corrects the lengths.",
        remove_when="SGLang lets a worker start a request without a prefill.",
        body="221fab06ce50",
    ),
    Symbol(
        target=f"{RELAY}.stash",
        args=("self", "future_indices", "payload"),
        reason="EmptyRelay overrides it: nothing is relayed.",
        remove_when="SGLang lets an algorithm do without a relay.",
    ),
    Symbol(
        target=f"{RELAY}._resolve_spec_extras",
        args=("self", "batch"),
        reason="EmptyRelay overrides it: nothing is relayed.",
        remove_when="SGLang lets an algorithm do without a relay.",
    ),
)
"""Functions that nothing hooks and that must be as they were; checked at the start."""
