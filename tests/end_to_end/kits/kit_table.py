"""Every test kit SGLang ships: what runs here, and why the rest cannot.

One row per mixin of ``sglang.test.kits``. A method that its row does not mention must
pass on our server where it passes on plain SGLang. ``dropped`` methods do not run.
``plain_fails`` ones fail on plain SGLang with this model; ours must fail with the same
message, so the answers behind it were the same. ``needs_drafts`` ones fail on plain
SGLang because it drafts nothing; ours must pass.
"""

import ast
import json
import random
from dataclasses import dataclass, field

from stand_ins import import_kit, kits_folder

ALL = "*"
"""In ``dropped``: every method of the mixin."""

_DATA_SET = "scores a real model on a data set of the model hub"
_REAL_MODEL = "asks what a real language model knows; the demo model knows records"
_REASONING = "needs a reasoning model: the demo model never thinks"
_GPU = "needs a CUDA device"
_IMAGES = "needs a vision model and the MMMU data set"
_CHANCE = "sampled, and it is chance whether the model ends its strings"
_ENDLESS = "the demo model writes one string until the answer is cut"
_MAMBA = "expects a Mamba cache, which misses at the first fork"
_SMALLER = "400 prompts take minutes on a CPU; test_radix_tree sends a smaller tree"
_TIMEOUTS = "test_drain.py lets requests time out while they wait and while they run"
_SESSIONS = "needs --enable-streaming-session, which VeriCache refuses by name"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One mixin.

    Attributes:
        kit: Module of ``sglang.test.kits``.
        mixin: Class in it.
        attributes: Class attributes it asks for, or that make it shorter.
        dropped: Method -> reason it does not run.
        plain_fails: Method -> reason plain SGLang fails it.
        needs_drafts: Methods only a speculative server can pass.
    """

    kit: str
    mixin: str
    attributes: dict = field(default_factory=dict)
    dropped: dict = field(default_factory=dict)
    plain_fails: dict = field(default_factory=dict)
    needs_drafts: tuple = ()

    def why_dropped(self, method):
        """Return the reason ``method`` does not run; empty where it does."""
        return self.dropped.get(method, self.dropped.get(ALL, ""))


def _not_run(kit, mixin, reason):
    return Row(kit=kit, mixin=mixin, dropped={ALL: reason})


def _bounded(properties):
    """Write a schema whose every value ends soon: the demo model would ramble on."""
    return json.dumps(
        {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    )


_WORD = {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 99999}


def _prompts_of_tokens(count, length):
    draw = random.Random(5)
    return [[draw.randint(8, 585) for _ in range(length)] for _ in range(count)]


def _all_but_the_last_token(result, history, output, label):
    """Check with SGLang's own assertion for caches that lag by one token.

    The last token of an answer whose complement is on the host has no exact KV: plain
    SGLang's overlap runs one forward more, ours has no reload left for it. The next
    turn prefills that token.
    """
    check = import_kit("kl_multiturn_utils").make_mamba_decode_assert(track_interval=1)
    check(result, history, output, label)


_RUN = (
    Row(
        kit="abort_timeout_kit",
        mixin="AbortAllMixin",
        attributes={"abort_all_num_requests": 24, "abort_all_sleep": 5},
    ),
    Row(kit="anthropic_messages_kit", mixin="AnthropicMessagesMixin"),
    Row(kit="basic_api_contract_kit", mixin="BasicAPIContractMixin"),
    Row(
        kit="basic_decode_correctness_kit",
        mixin="BasicDecodeCorrectnessMixin",
        plain_fails={
            "test_capital_france": _REAL_MODEL,
            "test_basic_math": _REAL_MODEL,
            "test_color_completion": _REAL_MODEL,
        },
    ),
    Row(
        kit="basic_scheduler_stress_kit",
        mixin="BasicSchedulerStressMixin",
        plain_fails={
            "test_streaming_response": _REAL_MODEL,
            "test_concurrent_requests": _REAL_MODEL,
            "test_long_prompt": "31,265 tokens here; "
            "the demo model's context is 16,384",
        },
    ),
    Row(
        kit="ebnf_constrained_kit",
        mixin="EBNFConstrainedMixin",
        dropped={"test_ebnf_generate_complex_json": _CHANCE},
    ),
    Row(
        kit="json_constrained_kit",
        mixin="JSONConstrainedMixin",
        attributes={"json_schema": _bounded({"name": _WORD, "population": _COUNT})},
    ),
    Row(
        kit="json_mode_kit",
        mixin="JSONModeMixin",
        plain_fails={
            "test_json_mode_response": _ENDLESS,
            "test_json_mode_with_streaming": _ENDLESS,
        },
    ),
    Row(
        kit="kl_divergence_kit",
        mixin="KLDivergenceMixin",
        attributes={
            "kl_div_thres": 0.003,
            "kl_div_max_samples": 4,
            "kl_div_prefill_max_new_tokens": 32,
            # SnapKV prefills a prompt's last 64 tokens again.
            "kl_div_decode_max_new_tokens": 96,
        },
    ),
    Row(
        kit="matched_stop_kit",
        mixin="MatchedStopMixin",
        plain_fails={
            "test_finish_stop_str": "the chat answer holds no line break",
            "test_finish_stop_regex_str": "the chat answer ends first",
            "test_finish_stop_eos": "the demo model ends on token 6",
        },
    ),
    Row(
        kit="pause_generation_kit",
        mixin="PauseResumeInPlaceMixin",
        attributes={
            "pause_num_requests": 8,
            "pause_duration": 1,
            "pause_ignore_eos": True,
            "pause_max_new_tokens": 320,
        },
    ),
    Row(
        kit="prefix_cache_branching_kit",
        mixin="PrefixCacheBranchingMixin",
        attributes={"cache_chunk_size": 64},
        plain_fails={"test_prefix_cache_branching": _MAMBA},
    ),
    Row(
        kit="reasoning_kit",
        mixin="ReasoningTokenUsageMixin",
        dropped={"test_reasoning_tokens_generate_exact_count": _REASONING},
        plain_fails={
            "test_reasoning_tokens_thinking": _REASONING,
            "test_reasoning_tokens_thinking_stream": _REASONING,
        },
    ),
    Row(
        kit="reasoning_kit",
        mixin="SeparateReasoningMixin",
        plain_fails={
            "test_nonstreaming_separate_reasoning_true": _REASONING,
            "test_streaming_separate_reasoning_true": _REASONING,
            "test_streaming_separate_reasoning_true_stream_reasoning_false": _REASONING,
        },
    ),
    Row(
        kit="regex_constrained_kit",
        mixin="RegexConstrainedMixin",
        dropped={"test_regex_generate_complex_json": _CHANCE},
    ),
    Row(
        kit="spec_server_kits",
        mixin="SpecCorrectnessKit",
        attributes={"acc_length_thres": 1.2, "batch_accept_len_thres": 1.2},
        needs_drafts=("test_acc_length",),
    ),
    Row(kit="spec_server_kits", mixin="SpecParityKit"),
    Row(kit="spec_server_kits", mixin="SpecLogprobKit"),
    Row(kit="spec_server_kits", mixin="SpecPenaltyKit"),
    Row(
        kit="spec_server_kits",
        mixin="SpecFeatureKit",
        dropped={"test_radix_attention": _SMALLER},
    ),
    Row(
        kit="spec_server_kits",
        mixin="SpecGrammarKit",
        attributes={
            "grammar_json_schema": _bounded(
                {
                    "name": _WORD,
                    "population": _COUNT,
                    "country": _WORD,
                    "capital": _WORD,
                }
            )
        },
        needs_drafts=(
            "test_grammar_structured_output_no_trailing_tokens",
            "test_grammar_logprob_count_matches_completion_tokens",
        ),
    ),
    Row(
        kit="unified_radix_cache_kit",
        mixin="UnifiedRadixTreeTestMixin",
        attributes={
            "input_ids": _prompts_of_tokens(4, 128),
            "max_new_tokens": 24,
            "num_groups": 2,
            "branches_per_group": 2,
            "prefix_len": 64,
            "decode_cache_assert": staticmethod(_all_but_the_last_token),
        },
        dropped={"test_gsm8k": _DATA_SET},
    ),
)

_CANNOT = (
    _not_run(
        "abort_timeout_kit",
        "WaitingTimeoutMixin",
        _TIMEOUTS,
    ),
    _not_run("abort_timeout_kit", "RunningTimeoutTwoWaveMixin", _TIMEOUTS),
    _not_run(
        "spec_decoding_kit",
        "SpecDecodingMixin",
        "measures the speed of one long answer, which a benchmark does",
    ),
    _not_run("eval_accuracy_kit", "MMLUSanityMixin", _DATA_SET),
    _not_run("eval_accuracy_kit", "GSM8KMixin", _DATA_SET),
    _not_run("eval_accuracy_kit", "MMLUMixin", _DATA_SET),
    _not_run("eval_accuracy_kit", "MMMUProMixin", _IMAGES),
    _not_run("eval_accuracy_kit", "HumanEvalMixin", _DATA_SET),
    _not_run("eval_accuracy_kit", "MGSMEnMixin", _DATA_SET),
    _not_run("fwd_occupancy_kit", "FwdOccupancyMixin", _GPU),
    _not_run("lm_eval_kit", "LMEvalMixin", _DATA_SET),
    _not_run("mmmu_vlm_kit", "MMMUMixin", _IMAGES),
    _not_run(
        "pd_parity_kit",
        "PDLogprobParityMixin",
        "compares a prefill and decode pair: disaggregation/test_pair.py does",
    ),
    _not_run("spec_server_kits", "SpecAccuracyKit", _DATA_SET),
    _not_run("spec_server_kits", "SpecPerfKit", _DATA_SET),
    _not_run(
        "spec_server_kits",
        "SpecHiddenStatesKit",
        "needs --enable-return-hidden-states, which VeriCache refuses by name",
    ),
    _not_run("streaming_session_kit", "StreamingSessionKitMixin", _SESSIONS),
    _not_run("streaming_session_kit", "AbortLeakReproKitMixin", _SESSIONS),
    _not_run(
        "unified_radix_cache_kit",
        "AccuracyTwoPassMixin",
        f"{_DATA_SET}, and needs --enable-hierarchical-cache, which VeriCache refuses",
    ),
)

ROWS = (*_RUN, *_CANNOT)

WITHOUT_METHODS = {
    "cache_hit_kit": "a function: test_kits.py::test_multiturn_cache_hit",
    "radix_cache_server_kit": "functions: test_kits.py::test_radix_tree",
    "dsa_metadata_kit": "helpers for the tests of one CUDA attention backend",
    "perf_bench_kit": "helpers for speed limits of SGLang's own machines",
    "vlm_perf_kit": "helpers for the speed of vision models",
}
"""Kits without a test method of their own, and where they are used here."""


def shipped():
    """Return module -> mixin -> its test methods, as the installed files say."""
    found = {}
    for file in sorted(kits_folder().glob("[!_]*.py")):
        classes = found.setdefault(file.stem, {})
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and (methods := _test_methods(node)):
                classes[node.name] = methods
    return found


def _test_methods(node):
    functions = (item for item in node.body if isinstance(item, ast.FunctionDef))
    return [item.name for item in functions if item.name.startswith("test")]
