"""Differential fuzzing: random requests of every kind, whose results may not depend on how they are run.

`python tests/long/fuzz.py --rounds 2000 --seed 0`. In each round a default engine answers the requests, and
then one with a tiny cache, small chunks, 1 to 16 sequences at a time, overlapped steps or not and perhaps two
ranks, where requests also arrive late and are aborted, and where methods that a step goes through raise
errors. Results must be equal, but for ties that rounding decides, and say what reference.py makes of their
tokens; and both engines must be empty. Round r of seed s is round 0 of seed s + r.
"""

import argparse
import itertools
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import paths  # noqa: F401
import pytest
import torch
from engines import assert_empty, observer_of
from faults import SITES, object_of
from reference import check_result, logprobs_of

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.engine.sequence import Sequence
from nanovllm.extensions.safety.admission import AdmissionControl
from nanovllm.extensions.text.results import GrowingText, Logprob, make_result
from nanovllm.extensions.text.stop_texts import StopTexts
from tiny_checkpoints import ARCHITECTURES, EXACT, load_reference, make_checkpoint, make_tokenizer

VOCAB = 257
LETTERS = "abcd"
LETTER_IDS = make_tokenizer().convert_tokens_to_ids(list(LETTERS))
LONGEST_PROMPT, MOST_TOKENS = 64, 24
STRUCTURES = [
    StructuredOutputsParams(regex="[abcd]*"),
    StructuredOutputsParams(regex="(a|bb|cab){2,9}d?"),
    StructuredOutputsParams(choice=["abba", "ab", "dad", "cabbage"]),
    StructuredOutputsParams(grammar='start: "a" start "b" | "c"'),
    StructuredOutputsParams(json={"type": "array", "items": {"enum": ["a", "ab", 1]}, "maxItems": 4}),
]
SAME = ("text", "finish_reason", "stop_reason")
# Log-probabilities that rounding may swap, and the noise of logits that it amounts to. In an 8-bit cache it
# may decide between two codes of a key or value.
CLOSE = {"auto": 1e-4, "int8": 0.05}
NOISE = {"auto": 1e-5, "int8": 0.01}
# Not what comes after the steps, nor what begins anew after an error: an engine that cannot has ended.
BREAKING = [site for site in SITES if site[0] not in ("results", "progress bar") and site[1] != "call"]
BROKEN_OFF = ("abort", "error")
CHECKPOINT = dict(vocab_size=VOCAB, num_hidden_layers=1, max_position_embeddings=256, seed=1)


class Question(NamedTuple):
    """`params` is None where the prompt is to be scored."""

    prompt: list[int]
    params: SamplingParams | None


class Answer(NamedTuple):
    """What an engine says to a request, and the pieces of its text as they were seen while it grew."""

    result: dict[str, Any]
    pieces: str | None = None


# --- what is asked ---


def random_options(pick: random.Random) -> dict[str, Any]:
    block_size = pick.choice([16, 16, 32, 48, 64])
    num_tokens = pick.choice([LONGEST_PROMPT + MOST_TOKENS, 112, 128, 160, 224, 384])
    return dict(
        kvcache_block_size=block_size,
        num_kvcache_blocks=-(-num_tokens // block_size),
        kv_cache_dtype=pick.choice(["auto", "auto", "int8"]),
        tensor_parallel_size=2 if pick.random() < 0.05 else 1,
        max_num_batched_tokens=pick.choice([7, 16, 24, 40, 100, 16384]),
        max_num_seqs=pick.randint(1, 16),
        enable_prefix_caching=pick.random() < 0.7,
    )


def random_prompt(pick: random.Random, beginnings: list[list[int]]) -> list[int]:
    prompt = pick.choice(beginnings)[: pick.choice([pick.randint(0, LONGEST_PROMPT), LONGEST_PROMPT])]
    prompt = prompt + [pick.randrange(VOCAB) for _ in range(pick.choice([0, 1, 3, 20]))]
    return prompt[:LONGEST_PROMPT] or [pick.randrange(VOCAB)]


def random_params(pick: random.Random) -> SamplingParams:
    """Often of few letters, where stop texts, bad words and penalties have something to do."""
    max_tokens, letter = pick.randint(1, MOST_TOKENS), lambda: pick.choice(LETTERS)
    some = {
        "n": lambda: pick.randint(2, 4),
        "ignore_eos": lambda: True,
        "top_k": lambda: pick.randint(1, 20),
        "top_p": lambda: pick.uniform(0.2, 1),
        "min_p": lambda: pick.uniform(0, 0.2),
        "presence_penalty": lambda: pick.uniform(-2, 2),
        "frequency_penalty": lambda: pick.uniform(-2, 2),
        "repetition_penalty": lambda: pick.uniform(0.7, 1.5),
        "logit_bias": lambda: {pick.randrange(VOCAB): pick.uniform(-5, 5) for _ in range(3)} | {256: 3.0},
        "bad_words": lambda: [letter() + letter() + letter() * pick.randint(0, 2) for _ in range(3)],
        "allowed_token_ids": lambda: pick.sample(range(VOCAB), 30),
        "min_tokens": lambda: pick.randint(0, max_tokens),
        "stop": lambda: [letter() + letter() + letter(), letter() + letter(), letter()][: pick.randint(1, 3)],
        "stop_token_ids": lambda: pick.sample(range(VOCAB), 15),
        "include_stop_str_in_output": lambda: True,
        "skip_special_tokens": lambda: False,
        "logprobs": lambda: pick.choice([0, 1, 5, 20]),
        "prompt_logprobs": lambda: pick.choice([0, 1, 20]),
    }
    chosen = {name: draw() for name, draw in some.items() if pick.random() < 0.25}
    if pick.random() < 0.4:
        chosen["allowed_token_ids"] = LETTER_IDS
    if pick.random() < 0.2:
        chosen.pop("allowed_token_ids", None)
        chosen["structured_outputs"] = pick.choice(STRUCTURES)
    if "stop" not in chosen and pick.random() < 0.1:
        chosen["detokenize"] = False
    return SamplingParams(pick.choice([0, 0, 0.7, 1, 1.5]), max_tokens, seed=pick.randrange(2**63), **chosen)


def random_requests(pick: random.Random, llm: LLM, beginnings: list[list[int]]) -> list[Question]:
    requests, count = [], pick.randint(1, 14)
    while len(requests) < count:
        prompt = random_prompt(pick, beginnings)
        request = Question(prompt, random_params(pick) if pick.random() < 0.9 else None)
        try:
            if request.params is not None:
                llm.prompts.read(*request)
        except ValueError:  # such as stop tokens that are all there is to draw
            continue
        requests.append(request)
    return requests


# --- how it is answered ---


def answer_at_once(llm: LLM, requests: list[Question]) -> list[Answer]:
    asked = [request for request in requests if request.params is not None]
    prompts, params = [request.prompt for request in asked], [request.params for request in asked]
    results = iter(llm.generate(prompts, params, use_tqdm=False))
    scored = [request.prompt for request in requests if request.params is None]
    scores = iter(llm.score(scored, use_tqdm=False))
    return [Answer(next(scores if request.params is None else results)) for request in requests]


class InjectedError(Exception):
    pass


@contextmanager
def breaking(llm: LLM, pick: random.Random, counts: Counter) -> Iterator[None]:
    """One of the next calls of some method raises an error."""
    place, name = pick.choice(BREAKING)
    target, when, calls = object_of(llm, place), pick.choice([0, 0, 1, 3]), itertools.count()
    function = getattr(target, name)

    def call(*args, **kwargs):
        if next(calls) == when:
            counts["errors"] += 1
            raise InjectedError(f"{place}.{name}")
        return function(*args, **kwargs)

    with mock.patch.object(target, name, call):
        yield


def queue(llm: LLM, question: Question) -> list[Sequence]:
    """Returns the completions, of which there are none where nothing is to be scored."""
    prompt, params = question
    if params is None:
        [(_, request)] = llm.prompts.read_scored([prompt], 1)
    else:
        request = llm.prompts.read(prompt, params)
    return llm.queue(request) if request.token_ids else []


def answer_in_steps(llm: LLM, requests: list[Question], pick: random.Random, counts: Counter) -> list[Answer]:
    """
    Requests arrive while others run, some are aborted, steps fail, and texts are looked at while they grow.
    """
    groups: list[list[Sequence]] = []
    texts: dict[int, tuple[GrowingText, list[str]]] = {}
    abort_rate, error_rate = pick.choice([0, 0.03, 0.2]), pick.choice([0, 0.1, 0.5])
    isolate = pick.random() < 0.5
    if llm.config.tensor_parallel_size > 1:
        error_rate = 0  # an error ends such an engine
    while len(groups) < len(requests) or not llm.is_finished():
        is_broken = pick.random() < error_rate
        # An error may come later: where a step that waits to draw has kept the method.
        with suppress(InjectedError), breaking(llm, pick, counts) if is_broken else nullcontext():
            while len(groups) < len(requests) and (pick.random() < 0.8 or llm.is_finished()):
                question = requests[len(groups)]
                group = queue(llm, question)
                groups.append(group)
                params = question.params
                if params is not None and params.n == 1 and params.detokenize:
                    texts[len(groups) - 1] = GrowingText(llm.tokenizer, group[0]), []
            if pick.random() < abort_rate and (unfinished := sorted(llm.unfinished)):
                llm.abort(pick.choice(unfinished))
                counts["aborted"] += 1
            (llm.step_or_isolate if isolate else llm.step)()
            for text, pieces in texts.values():  # not after an error: a token may be taken back then
                pieces.append(text.take_delta())
    answers = []
    for i, ((prompt, params), group) in enumerate(zip(requests, groups, strict=True)):
        counts["blamed"] += any(seq.finish_reason == "error" for seq in group)
        if params is None:
            aborted = bool(group) and group[0].finish_reason in BROKEN_OFF
            logprobs = [logprob for seq in group[:1] for logprob, *_ in seq.request.own["scores"].found]
            answers.append(Answer(dict(token_ids=prompt, token_logprobs=[None, *logprobs], aborted=aborted)))
        else:
            pieces = "".join(texts[i][1]) if i in texts else None
            answers.append(Answer(make_result(llm.tokenizer, group), pieces))
    return answers


# --- what must hold ---


def check_answer(expected: dict[str, Any], found: Answer, close: float) -> None:
    """Raise AssertionError unless it is what was expected, or the beginning of it where it was broken off."""
    result = found.result
    if "token_logprobs" in expected:
        count = len(result["token_logprobs"])
        assert count == len(expected["token_logprobs"]) or result["aborted"]
        assert result["token_logprobs"] == pytest.approx(expected["token_logprobs"][:count], abs=close)
        return
    if found.pieces is not None:
        assert found.pieces == result["text"], "what was seen of the text is not the text"
    assert result["num_prompt_tokens"] == expected["num_prompt_tokens"]
    assert 0 <= result["num_cached_tokens"] < result["num_prompt_tokens"]
    outputs = [each.get("outputs", [each]) for each in (expected, result)]
    any_aborted = False
    for one, other in zip(*outputs, strict=True):
        aborted = other["finish_reason"] in BROKEN_OFF
        any_aborted |= aborted
        count = len(other["token_ids"])
        assert other["token_ids"] == (one["token_ids"][:count] if aborted else one["token_ids"])
        if not aborted:
            assert {key: one[key] for key in SAME} == {key: other[key] for key in SAME}
        check_logprobs(one.get("logprobs", [])[:count], other.get("logprobs", []), close)
    wanted, known = (each.get("prompt_logprobs", [None])[1:] for each in (expected, result))
    assert len(known) == len(wanted) or any_aborted
    check_logprobs(wanted[: len(known)], known, close)


def check_logprobs(expected: list[dict[int, Logprob]], found: list[dict[int, Logprob]], close: float) -> None:
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        for known, others in ((one, other), (other, one)):
            least = min(entry.logprob for entry in others.values())
            for token_id, entry in known.items():
                if token_id not in others:  # of two that are as likely, either may be among the likeliest
                    assert entry.logprob < least + close
                    continue
                assert entry.logprob == pytest.approx(others[token_id].logprob, abs=close)
                assert close > 0.01 or abs(entry.rank - others[token_id].rank) <= 1
                assert entry.decoded_token == others[token_id].decoded_token


def rounding_explains(llm: LLM, request: Question, found: Answer) -> bool:
    """Whether the default engine answers like this too, if its logits are changed a little."""
    model, noise = llm.model_runner.model, torch.Generator().manual_seed(0)
    compute_logits, cache = model.compute_logits, llm.config.kv_cache_dtype

    def changed(hidden_states: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(hidden_states)
        return logits + NOISE[cache] * torch.randn(logits.shape, generator=noise)

    with mock.patch.object(model, "compute_logits", changed):
        for _ in range(30):
            llm.scheduler.clear()
            try:
                check_answer(answer_at_once(llm, [request])[0].result, found, CLOSE[cache])
                return True
            except AssertionError:
                pass
    return False


def check_by_reference(llm: LLM, request: Question, result: dict[str, Any], model: Any = None) -> None:
    """With a model of transformers its log-probabilities are wanted too."""
    prompt, params = request
    if params is not None:
        check_result(llm.tokenizer, prompt, params, result, llm.prompts.max_num_tokens, model)
    elif model is not None:
        found = [*result["token_logprobs"][1:], result["logprob"]]
        expected = logprobs_of(model, prompt) if len(prompt) > 1 else []
        assert found == pytest.approx([*expected, sum(expected)], abs=0.01)


def check_empty(llm: LLM) -> None:
    assert_empty(llm)
    assert sorted(llm.scheduler.free_slots) == list(range(llm.config.max_num_seqs))
    assert not llm.scheduler.running and not llm.scheduler.waiting and llm.scheduler.chunked is None
    assert (
        not llm.unfinished
        and not observer_of(llm, StopTexts).texts
        and not llm.parts.logits_processor("bitmask")._states
    )


def fuzz_once(defaults: dict[str, LLM], model: Any, seed: int, counts: Counter) -> None:
    pick = random.Random(seed)
    beginnings = [[pick.randrange(VOCAB) for _ in range(LONGEST_PROMPT)] for _ in range(3)]
    options = random_options(pick)
    default = defaults[options["kv_cache_dtype"]]
    default.scheduler.clear()  # a round depends on its seed alone
    # Where the forecast is heeded few are ever preempted.
    is_ignored = mock.patch.object(AdmissionControl, "_most_needed", return_value=0)
    with (
        is_ignored if pick.random() < 0.5 else nullcontext(),
        LLM(default.config.model, **{**EXACT, **options}, max_model_len=256) as llm,
    ):
        llm._overlap = pick.random() < 0.5
        for _ in range(pick.randint(1, 2)):
            requests = random_requests(pick, llm, beginnings)
            expected = answer_at_once(default, requests)
            answers = answer_in_steps(llm, requests, pick, counts)
            check_empty(default)
            check_empty(llm)
            for request, (result, _), answer in zip(requests, expected, answers, strict=True):
                check_by_reference(default, request, result, model if default is defaults["auto"] else None)
                check_by_reference(llm, request, answer.result)
                try:
                    check_answer(result, answer, CLOSE[default.config.kv_cache_dtype])
                except AssertionError:
                    if not rounding_explains(default, request, answer):
                        raise
                    counts["ties"] += 1
                counts[result.get("finish_reason", "scored")] += 1
                counts["stop texts"] += isinstance(result.get("stop_reason"), str)
                counts["tokens"] += sum(len(o["token_ids"]) for o in result.get("outputs", [result]))
                if request.params is not None:  # what was said may be gone on with
                    beginnings.append(request.prompt + result["token_ids"])
        counts["preemptions"] += llm.scheduler.num_preemptions
        counts["overlapped"] += llm._overlap
        counts["8-bit"] += options["kv_cache_dtype"] == "int8"
        counts["two ranks"] += options["tensor_parallel_size"] == 2
    counts["rounds"] += 1


def fuzz(folder: str, num_rounds: int, seed: int, report=lambda counts: None) -> Counter:
    counts = Counter()
    options = dict(device="cpu", dtype="float32", max_model_len=256, num_kvcache_blocks=40)
    model = load_reference(Path(folder))
    with LLM(folder, **options) as default, LLM(folder, **options, kv_cache_dtype="int8") as int8:
        defaults = {"auto": default, "int8": int8}
        for number in range(seed, seed + num_rounds):
            try:
                fuzz_once(defaults, model, number, counts)
            except Exception as error:
                raise AssertionError(
                    f"`python tests/long/fuzz.py --rounds 1 --seed {number}` fails"
                ) from error
            report(counts)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="qwen3")
    parser.add_argument("--sliding-window", type=int, help="of an architecture that has one")
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()

    def report(counts: Counter) -> None:
        if counts["rounds"] % 100 == 0:
            seconds = time.perf_counter() - start
            print(f"{counts['rounds']:,} rounds in {seconds:,.0f} s, {counts['tokens']:,} tokens", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        window = {"sliding_window": args.sliding_window} if args.sliding_window else {}
        make_checkpoint(Path(folder), args.architecture, **CHECKPOINT, **window)
        counts = fuzz(folder, args.rounds, args.seed, report)
    print(", ".join(f"{count:,} {name}" for name, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
