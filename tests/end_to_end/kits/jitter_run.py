"""Child process: SGLang's cache-consistency jitter test on an engine of ours.

It generates a continuation of each of some prompts, sends every prompt again with cuts
of it while requests are retracted in a pool that is too small, and wants the same
tokens and the same top log-probabilities wherever two requests share a context.

The stream jitter itself delays CUDA streams and is off here. The comparison is bitwise
and supposes batch-invariant matrix products, which a CPU has not: plain SGLang differs
from itself in the sixth digit. So the engine given to the test takes log-probabilities
that lie within ``TOLERANCE`` of one seen in the same context for that one.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

from stand_ins import import_kit

MODEL = Path(__file__).parents[3] / "configs" / "demo-model"
TOLERANCE = 1e-3
SIZES = {
    "num_unique_prefixes": 3,
    "requests_per_prefix": 4,
    "prefix_len_min": 160,
    "prefix_len_max": 320,
    "new_tokens": 80,
    "topk": 4,
    "min_retracted_requests": 3,
    "vocab_size": 586,
}


class TolerantEngine:
    """An engine whose log-probabilities agree where they nearly do."""

    def __init__(self, engine):
        self._engine = engine
        self._seen = defaultdict(list)

    def flush_cache(self):
        return self._engine.flush_cache()

    def generate(self, *, input_ids, **arguments):
        answers = self._engine.generate(input_ids=input_ids, **arguments)
        for prompt, answer in zip(input_ids, answers, strict=True):
            tokens, tops = answer["output_ids"], answer["meta_info"]
            tops["output_top_logprobs"] = [
                [self._settle((*prompt, *tokens[:i]), entry) for entry in top]
                for i, top in enumerate(tops["output_top_logprobs"])
            ]
        return answers

    def _settle(self, context, entry):
        value, token, *rest = entry
        values = self._seen[context, token]
        near = [known for known in values if abs(known - value) <= TOLERANCE]
        if not near:
            values.append(value)
        return [near[0] if near else value, token, *rest]


def main():
    """Run the test, then print VeriCache's counters as the last line."""
    kit = import_kit("cache_consistency_jitter")
    arguments = {
        "model_path": str(MODEL),
        "device": "cpu",
        "attention_backend": "vericache",
        "dtype": "float32",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "speculative_algorithm": "VERICACHE",
        "max_total_tokens": int(sys.argv[1]),
        "max_running_requests": 16,
        "log_level": "warning",
    }
    with kit.get_jitter_engine(
        jitter_probability=0.0, retract_interval=25, **arguments
    ) as engine:
        kit.run_jitter_test(TolerantEngine(engine), **SIZES)
        state = engine.get_server_info()["internal_states"][0]
        print(json.dumps(state["vericache"]))


if __name__ == "__main__":
    main()
