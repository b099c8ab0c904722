"""Section 3 of the paper on a model and prompts of one's own.

Plain SGLang answers every sample (full KV). Then, for every compressor, a server of the
compressed KV alone and a server of VeriCache answer the same samples. Task scores, text
metrics and the first differing token compare those answers. The KL divergence is
measured apart: plain SGLang samples sequences at ``--temperature``, the lossy server is
made to emit the same tokens and reports its distributions after them. VeriCache and a
second pass of plain SGLang, all requests at once, sample with the same seeds; their
distributions are compared up to the first token that differs, so that VeriCache's KL is
measured from what it has verified with.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import ConfigError
from vericache_sglang.evaluation.altered import LOSSY, forced_tokens
from vericache_sglang.evaluation.benchmark import DEMO_LONG, Benchmark
from vericache_sglang.evaluation.compressor_lines import lines
from vericache_sglang.evaluation.divergence_page import draw_page, page
from vericache_sglang.evaluation.figures import growth, per_verify
from vericache_sglang.evaluation.fleet import served
from vericache_sglang.evaluation.picture import require_matplotlib
from vericache_sglang.evaluation.quality import (
    first_divergence,
    interval,
    rouge_l,
    step_divergences,
    token_match,
    word_f1,
)
from vericache_sglang.evaluation.systems import described, words
from vericache_sglang.evaluation.tasks.catalog import (
    SAMPLING,
    TASKS,
    prompt_of,
    samples_of,
)
from vericache_sglang.evaluation.workload import open_tokenizer

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from vericache_sglang.evaluation.benchmark import Results
    from vericache_sglang.evaluation.compressor_lines import Line
    from vericache_sglang.evaluation.server import Server, Starter
    from vericache_sglang.evaluation.systems import System
    from vericache_sglang.evaluation.tasks.sample import Task, TaskSample

FULL, AGAIN = "full KV", "full KV, all at once"
WHOLE = 1024
"""Vocabularies up to this many tokens are compared whole where ``--top-k`` is 0."""

SEEDED = "--enable-deterministic-inference"
"""Without it SGLang drops seeds, and no two systems sample the same sequence."""

MOST_LISTED = 100
"""Tokens compared of larger vocabularies where ``--top-k`` is 0."""


STUDY: Mapping[str, tuple[Any, str]] = {
    **SAMPLING,
    "output": (2048, "most tokens of an answer; data sets ask for up to 16,000"),
    "turns": (20, "most answers in one conversation"),
    "temperature": (0.5, "of the sequences whose KL is measured, > 0"),
    "kl-tokens": (250, "most tokens of those sequences"),
    "top-k": (0, "tokens compared; 0: all of up to 1,024, else 100"),
    "clients": (4, "requests at once"),
    "min-prompt": (256, "tokens from which prompts are compressed"),
}
"""The options that a ``Study`` reads, besides ``model`` and ``seed``."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system's answers to one sample.

    Attributes:
        texts: Text of each answer.
        ids: Token ids of the first answer.
    """

    texts: tuple[str, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Study:
    """The samples and options shared by all systems.

    Attributes:
        options: The command line.
        tokenizer: The model's.
        samples: Task -> its samples.
        top_k: Tokens whose log-probabilities are compared.
    """

    options: argparse.Namespace
    tokenizer: Any
    samples: Mapping[str, Sequence[TaskSample]]
    top_k: int

    def prompt(self, sample: TaskSample, messages: Sequence[Any]) -> list[int]:
        """Return a prompt's token ids."""
        text = prompt_of(self.tokenizer, sample, messages)
        if text is None:
            return list(self.tokenizer.encode(sample.text))
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def converse(self, server: Server, task: Task, sample: TaskSample) -> Conversation:
        """Answer one sample to its end, as the data set's own runner asks."""
        messages, texts, ids = list(sample.messages), list[str](), list[tuple[int]]()
        tokens = min(sample.output_tokens, self.options.output)
        params = {**sample.sampling, "max_new_tokens": tokens}
        for _ in range(self.options.turns):
            asked = self.prompt(sample, messages)
            got = server.generate({"input_ids": asked, "sampling_params": params})
            texts.append(got["text"])
            ids.append(tuple(got["output_ids"]))
            more = task.follow(sample, texts)
            if more is None:
                break
            messages += [{"role": "assistant", "content": got["text"]}, *more]
        return Conversation(tuple(texts), ids[0])

    def sequence(
        self,
        server: Server,
        sample: TaskSample,
        number: int,
        forced: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Sample one sequence with the distributions of its tokens.

        Args:
            sample: Sample with the prompt; its first turn is used.
            number: Determines the seed.
            forced: Tokens that a lossy server must emit.

        Returns:
            ``ids``, and ``top``: the most probable tokens of each position.
        """
        options = self.options
        tokens = min(sample.output_tokens, options.kl_tokens)
        params: dict[str, Any] = {
            "temperature": options.temperature,
            "sampling_seed": options.seed + number,
            "max_new_tokens": tokens,
        }
        if forced is not None:
            params |= {
                "max_new_tokens": len(forced),
                "custom_params": forced_tokens(forced),
            }
        got = server.generate(
            {
                "input_ids": self.prompt(sample, sample.messages),
                "sampling_params": params,
                "return_logprob": True,
                "top_logprobs_num": self.top_k,
            }
        )
        top = got["meta_info"]["output_top_logprobs"]
        return {"ids": got["output_ids"], "top": top}

    def each(
        self, ask: Callable[..., Any], at_once: int, *more: Sequence[Any]
    ) -> list[Any]:
        """Call ``ask`` with the entries of ``more``, so many at once, in order."""
        with ThreadPoolExecutor(at_once) as threads:
            return list(threads.map(ask, *more))


def prepare(options: argparse.Namespace) -> Study:
    """Read or draw the samples, and what is known of the model.

    Raises:
        ConfigError: An option is out of bounds, a task is unknown, or its data is
            missing or malformed.
    """
    for name in ("output", "turns", "kl_tokens", "clients"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be >= 1")
    if not options.temperature > 0:
        raise ConfigError("--temperature must be > 0: KL is of sampled sequences")
    if options.top_k < 0:
        raise ConfigError("--top-k must be >= 0")
    tokenizer = open_tokenizer(options.model)
    from transformers import AutoConfig

    model = str(options.model)
    vocabulary = AutoConfig.from_pretrained(model).get_text_config().vocab_size
    top_k = options.top_k or (vocabulary if vocabulary <= WHOLE else MOST_LISTED)
    return Study(
        options,
        tokenizer,
        samples_of(options, tokenizer),
        min(top_k, vocabulary),
    )


def systems_of(line: Line, options: argparse.Namespace) -> list[System]:
    """Return the systems of one compressor: it alone, and verified."""
    settings = {
        "compressor": line.compressor,
        "keep": line.keep or 1.0,
        "residency": "host",
        "min_prompt": options.min_prompt,
    }
    return [
        _described(f"lossy {line.name}", settings, options, alteration=LOSSY),
        _described(f"VeriCache {line.name}", settings, options),
    ]


def _described(
    name: str,
    settings: Mapping[str, Any] | None,
    options: argparse.Namespace,
    **more: Any,
) -> System:
    system = described(name, settings, {"disable_radix_cache": True}, **more)
    flags = (*system.flags, SEEDED, *words("--engine", options.engine))
    return replace(system, flags=flags)


def ask_all(
    study: Study, system: System, start: Starter | None = None
) -> dict[str, Any]:
    """Answer every sample with plain SGLang.

    Returns:
        Those of ``reference``, and under ``again`` the same sequences with all of a
        task's requests at once.
    """
    with served(system, study.options.model, start=start) as server:
        found: dict[str, Any] = {**reference(study, server), "again": {}}
        for name, samples in study.samples.items():
            one, numbers = partial(study.sequence, server), range(len(samples))
            found["again"][name] = study.each(one, len(samples), samples, numbers)
    return found


def reference(study: Study, server: Server) -> dict[str, Any]:
    """Return plain SGLang's ``conversations`` and ``sequences``, by task."""
    found: dict[str, Any] = {"conversations": {}, "sequences": {}}
    for name, samples in study.samples.items():
        ask, one = partial(study.converse, server, TASKS[name]), study.sequence
        found["conversations"][name] = study.each(ask, 1, samples)
        numbers = range(len(samples))
        found["sequences"][name] = study.each(partial(one, server), 1, samples, numbers)
    return found


def measure_system(
    study: Study, system: System, full: dict[str, Any], start: Starter | None = None
) -> dict[str, Any]:
    """Answer every sample with one system and compare it with the full KV.

    Args:
        study: What is asked.
        system: Lossy, or VeriCache.
        full: What ``ask_all`` returned.
        start: See ``served``.

    Returns:
        The row, of plain values.

    Raises:
        ServerError: The server failed.
    """
    with served(system, study.options.model, start=start) as server:
        tasks = compared(study, server, system, full)
        counted = per_verify(growth({}, server.counters()))
    kind = "lossy" if system.lossy else "VeriCache"
    return {"system": kind, "tasks": tasks, **counted}


def compared(
    study: Study, server: Server, system: System, full: dict[str, Any]
) -> dict[str, Any]:
    """Answer every sample on a running server and compare it with the full KV.

    Without seeds (``SEEDED``) only a lossy server is made to emit the same sequences,
    and no other one's KL divergence is measured.

    Args:
        study: What is asked.
        server: The system's.
        system: Its flags and alteration.
        full: What ``reference`` returned.

    Returns:
        By task: scores, likeness and, where measured, distances.
    """
    tasks, clients = {}, study.options.clients
    for name, samples in study.samples.items():
        ask = partial(study.converse, server, TASKS[name])
        answers = study.each(ask, clients, samples)
        tasks[name] = {
            **scores(TASKS[name], samples, answers),
            **likeness(full["conversations"][name], answers),
        }
        if not (system.lossy or SEEDED in system.flags):
            continue
        wanted, numbers = full["sequences"][name], range(len(samples))
        more = [[each["ids"] for each in wanted]] if system.lossy else []
        one = partial(study.sequence, server)
        got = study.each(one, clients, samples, numbers, *more)
        tasks[name] |= distances(wanted, got)
    return tasks


def scores(
    task: Task, samples: Sequence[TaskSample], answers: Sequence[Conversation]
) -> dict[str, Any]:
    """Return ``scores``: the task's figures with their intervals."""
    parts = [task.score(s, a.texts) for s, a in zip(samples, answers, strict=True)]
    return {
        "samples": len(samples),
        "scores": {
            name: interval([p[above] for p in parts], [p[below] for p in parts])
            for name, (above, below) in task.figures.items()
        },
    }


def likeness(
    wanted: Sequence[Conversation], answers: Sequence[Conversation]
) -> dict[str, Any]:
    """Return how alike two systems' free answers are; tokens of the first answers."""
    pairs = list(zip(wanted, answers, strict=True))
    ids = [(a.ids, b.ids) for a, b in pairs]
    texts = [("\n".join(b.texts), "\n".join(a.texts)) for a, b in pairs]
    return {
        "first_divergence": [first_divergence(a, b) for a, b in ids],
        "same_answers": interval([float(a == b) for a, b in texts]),
        "token_match": interval([token_match(a, b) for a, b in ids]),
        "word_f1": interval([word_f1(got, full) for got, full in texts]),
        "rouge_l": interval([rouge_l(got, full) for got, full in texts]),
    }


def distances(wanted: Sequence[Any], got: Sequence[Any]) -> dict[str, Any]:
    """Return the KL divergences of sampled sequences from the full KV.

    Args:
        wanted: The full KV's ``sequence`` of each sample.
        got: Another system's; only tokens after the same prefix are compared.

    Returns:
        ``steps`` (KL_t of each sequence, in nats), ``kl_per_step``,
        ``kl_per_sequence`` and ``same_sequences``: how many have all tokens in common.
    """
    steps, same = [], 0
    for a, b in zip(wanted, got, strict=True):
        at = first_divergence(a["ids"], b["ids"])
        same += at is None
        # The distribution at the first differing token is still after the same ones.
        compared = len(a["ids"]) if at is None else at + 1
        steps.append(step_divergences(a["top"][:compared], b["top"][:compared]))
    nats = [sum(each) for each in steps]
    return {
        "steps": [[round(value, 7) for value in each] for each in steps],
        "kl_per_step": interval(nats, [len(each) for each in steps]),
        "kl_per_sequence": interval(nats),
        "same_sequences": same,
    }


def _measure(options: argparse.Namespace, results: Results) -> None:
    if options.out:
        require_matplotlib()
    wanted = lines(options.compressors, options.keeps)
    study = prepare(options)
    results.figures = {
        "top_k": study.top_k,
        "sources": {name: TASKS[name].source for name in options.tasks},
    }
    full = ask_all(study, _described(FULL, None, options))
    results.row(FULL, _full_row, study, full)
    results.row(AGAIN, _again_row, full)
    for line in wanted:
        for system in systems_of(line, options):
            results.row(system.name, measure_system, study, system, full)
    _require(results)
    if options.out:
        report = results.write()
        draw_page(report, options.out.with_suffix(".svg"))


def _full_row(study: Study, full: dict[str, Any]) -> dict[str, Any]:
    answers = full["conversations"]
    return {
        "system": FULL,
        "tasks": {
            name: {
                **scores(TASKS[name], samples, answers[name]),
                **likeness(answers[name], answers[name]),
            }
            for name, samples in study.samples.items()
        },
    }


def _again_row(full: dict[str, Any]) -> dict[str, Any]:
    once = full["sequences"]
    tasks = {name: distances(once[name], full["again"][name]) for name in once}
    return {"system": AGAIN, "tasks": tasks}


def _require(results: Results) -> None:
    """Record failures: tokens not forced, or VeriCache not lossless."""
    for row in results.rows.values():
        for name, task in row["tasks"].items():
            where = f"{row['name']}, {name}"
            if row["system"] == "lossy":
                held = task["same_sequences"] == task["samples"]
                results.require(held, f"{where}: sequences were not forced")
            if row["system"] == "VeriCache":
                differ = [at for at in task["first_divergence"] if at is not None]
                results.require(not differ, f"{where}: {len(differ)} answers differ")


DIVERGENCE = Benchmark(
    about="Section 3 of the paper: KL by step, first divergence and task scores beside "
    "F1, of each compressor alone and of VeriCache. Fails where VeriCache's answers "
    "are not plain SGLang's.",
    model=DEMO_LONG,
    options={
        "compressors": (["kvzip", "turboquant:bits=2"], "as --vericache-compressor"),
        "keeps": ([0.25], "shares of tokens, of selectors"),
        **STUDY,
        "engine": ("", "SGLang flags of every server, quoted"),
    },
    measure=_measure,
    page=page,
    selecting=("compressors", "keeps"),
)
