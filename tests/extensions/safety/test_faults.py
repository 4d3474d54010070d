"""Whatever goes wrong inside the engine, wherever: `generate` raises it, and the engine is empty and right;
`step` raises it, and goes on; a request of AsyncLLM that is not to blame does not notice.

Errors are injected into each method that a step goes through, in its first calls and in later ones, with
requests that use everything: shared and banned tokens, several completions, scores, stop texts.
"""

import asyncio
import gc
import os
import threading
from dataclasses import replace

import pytest
import torch
from async_engines import idle
from engines import assert_empty, tokens_of
from faults import SITES, object_of
from soak import resident_bytes, soak

from nanovllm import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from nanovllm.distributed.ranks import EngineDeadError
from nanovllm.engine.sequence import Sequence
from nanovllm.extensions.safety.admission import AdmissionControl
from nanovllm.extensions.text import llm as text_llm
from nanovllm.extensions.text import results as texts
from tiny_checkpoints import EXACT, make_checkpoint, one_thread  # noqa: F401

# Of two letters, so that one of the stop texts comes with the 8th to 16th token, whatever the model.
STOPPING = dict(stop=["ab", "ba", "a" * 9, "b" * 9], min_tokens=8, allowed_token_ids=[64, 65])
PROMPTS = [[*range(40)], [7] * 20, [*range(40)], [1, 2, 3]]
PARAMS = [
    SamplingParams(0, 17, True, frequency_penalty=0.5, logprobs=1, prompt_logprobs=0),
    SamplingParams(1, 17, True, n=2, seed=1, top_k=2, **STOPPING),
    SamplingParams(0, 17, True, logit_bias={3: 1.0}),
    SamplingParams(0, 14, True, top_k=3, structured_outputs=StructuredOutputsParams(regex="([a-z][0-9])*")),
]
ERRORS = [MemoryError, RuntimeError("injected"), torch.OutOfMemoryError("injected")]
OPTIONS = dict(**EXACT, num_kvcache_blocks=8, max_num_batched_tokens=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=1, vocab_size=257))


@pytest.fixture(scope="module")
def engine(folder):
    with LLM(folder, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def async_engine(folder):
    with AsyncLLM(folder, **OPTIONS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _preemptions(no_forecast):
    """Their calls are wanted too."""


@pytest.fixture(scope="module")
def expected_results(engine):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdmissionControl, "_most_needed", lambda *_: 0)
        results = engine.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert engine.scheduler.num_preemptions > 0, "the calls of a preemption are wanted too"
    assert all(output["stop_reason"] in STOPPING["stop"] for output in results[1].outputs)
    return results


@pytest.fixture(scope="module")
def expected(expected_results):
    return tokens_of(expected_results)


def queue(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[Sequence]]:
    """Returns the completions of each."""
    requests = llm.prompts.read_all(prompts, params)
    return [llm.queue(request) for request in requests]


def logprobs_of(prompt: list[int], result: dict) -> list[float]:
    """Of the tokens of the prompt and the completion."""
    token_ids = prompt[1:] + result["token_ids"]
    described = result["prompt_logprobs"][1:] + result["logprobs"]
    return [entries[token_id].logprob for token_id, entries in zip(token_ids, described, strict=True)]


class Fault:
    """The error that one call of a method raises, instead of doing anything."""

    def __init__(self, llm: LLM, patch: pytest.MonkeyPatch, place: str, name: str, number: int):
        self.error, self.when, self.count = ERRORS[number], 1 + number * number, 0
        target = object_of(llm, place)
        self.function = getattr(target, name)
        patch.setattr(llm, "_overlap", number != 1)
        patch.setattr(target, name, lambda *args, **kwargs: self.call(*args, **kwargs))

    def call(self, *args, **kwargs):
        self.count += 1
        if self.count == self.when:
            raise self.error
        return self.function(*args, **kwargs)

    def is_raised_by(self, use) -> bool:
        """Whether it is; if it is not, then the call was not made."""
        try:
            use()
        except (MemoryError, RuntimeError) as raised:
            assert isinstance(raised, type(self.error) if isinstance(self.error, Exception) else self.error)
            return True
        assert self.count < self.when, "the error was swallowed"
        return False


@pytest.mark.parametrize("place, name", SITES, ids=lambda x: x)
def test_an_error_at_any_call_is_raised_and_leaves_the_engine_right(
    engine, expected, monkeypatch, place, name
):
    for number in range(3):
        # Its last block is partly filled: the next call copies from it, so it is pinned.
        engine.generate(PROMPTS[1], SamplingParams(0, 1), use_tqdm=False)
        with monkeypatch.context() as patch:
            fault = Fault(engine, patch, place, name, number)
            use_tqdm = place == "progress bar"
            raised = fault.is_raised_by(lambda: engine.generate(PROMPTS, PARAMS, use_tqdm))  # noqa: B023
            assert raised or number, "never called"
        assert_empty(engine)
    assert tokens_of(engine.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected


@pytest.mark.parametrize("place, name", SITES, ids=lambda x: x)
def test_an_error_in_stream_or_score_is_raised_and_leaves_the_engine_right(engine, monkeypatch, place, name):
    params = SamplingParams(0, 20, True, frequency_penalty=0.5, **STOPPING)
    uses = [
        lambda: "".join(engine.stream([7] * 30, params)),
        lambda: engine.score(PROMPTS[:1], use_tqdm=False),
    ]
    for number, use in enumerate(uses):
        with monkeypatch.context() as patch:
            Fault(engine, patch, place, name, number).is_raised_by(use)
        assert_empty(engine)
    text, [scores] = (use() for use in uses)
    assert text == engine.generate([[7] * 30], params, use_tqdm=False)[0]["text"]
    [prompt] = engine.generate(PROMPTS[:1], PARAMS[:1], use_tqdm=False)
    told = [
        entries[i].logprob for i, entries in zip(PROMPTS[0][1:], prompt["prompt_logprobs"][1:], strict=True)
    ]
    assert scores["token_logprobs"][1:] == pytest.approx(told, abs=1e-4)


@pytest.mark.parametrize("place, name", SITES, ids=lambda x: x)
def test_after_an_error_in_step_the_next_one_goes_on(engine, expected_results, monkeypatch, place, name):
    for number in (1, 2):
        groups = queue(engine, PROMPTS, PARAMS)
        ids = [seq.seq_id for group in groups for seq in group]
        found, num_raised = [], 0
        with monkeypatch.context() as patch:
            fault = Fault(engine, patch, place, name, number)
            while not engine.is_finished():
                try:
                    found += engine.step()[0]
                except (MemoryError, RuntimeError):
                    num_raised += 1
        assert num_raised == (fault.count >= fault.when)
        assert sorted(request_id for request_id, _ in found) == ids
        results = [texts.make_result(engine.tokenizer, group) for group in groups]
        assert tokens_of(results) == tokens_of(expected_results)
        logprobs, as_expected = (logprobs_of(PROMPTS[0], found[0]) for found in (results, expected_results))
        assert logprobs == pytest.approx(as_expected, abs=1e-4)
        assert_empty(engine)


ASYNC_SITES = [site for site in SITES if site[0] not in ("results", "progress bar")]


@pytest.mark.parametrize("place, name", ASYNC_SITES, ids=lambda x: x)
def test_an_error_in_async_llm_reaches_one_task_at_most(async_engine, expected, monkeypatch, place, name):
    async def use() -> list:
        tasks = map(async_engine.generate, PROMPTS, PARAMS)
        return await asyncio.gather(*tasks, return_exceptions=True)

    with monkeypatch.context() as patch:
        Fault(async_engine.llm, patch, place, name, ASYNC_SITES.index((place, name)) % 3)
        results = asyncio.run(use())
    assert sum(isinstance(result, Exception) for result in results) <= 1
    for result, tokens in zip(results, expected, strict=True):
        assert isinstance(result, (MemoryError, RuntimeError)) or result["token_ids"] == tokens
    asyncio.run(idle(async_engine))
    assert_empty(async_engine.llm)


POISON = [[250, 251, 252] * 3, SamplingParams(0, 20, True, n=2, stop="never\n seen")]
POISONED = {  # what fails for each sequence of it
    "launching": lambda step, *_: step.sequences,
    "decoding": lambda sequences: sequences,
    "enqueueing": lambda seq: [seq],
    "find_stop": lambda text: [text.seq] if len(text.seq.token_ids) > 12 else [],
    "look": lambda text: [text.seq] if len(text.seq.token_ids) > 12 else [],
    "result": lambda tokenizer, sequences: sequences,
}


def poison(llm: LLM, patch: pytest.MonkeyPatch, what: str) -> list[int]:
    """Have the poisoned prompt fail wherever it takes part. Returns a list that gets an item each time."""
    target, name = {
        "launching": (llm, "_launch"),
        "decoding": (llm.batches, "decode"),
        "enqueueing": (llm.scheduler, "add"),
        "find_stop": (texts.GrowingText, "find_stop"),
        "look": (texts.GrowingText, "take_delta"),
        "result": (text_llm, "make_result"),
    }[what]
    function, failures = getattr(target, name), []

    def failing(*args):
        if any(seq.prompt_token_ids == POISON[0] for seq in POISONED[what](*args)):
            failures.append(len(failures))
            raise torch.OutOfMemoryError("too much")
        return function(*args)

    patch.setattr(target, name, failing)
    return failures


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("what", POISONED)
def test_a_request_that_fails_is_the_only_one_of_async_llm_that_does(
    async_engine, expected, monkeypatch, what, overlap
):
    llm, params = async_engine.llm, replace(PARAMS[1], n=1)

    async def collect(prompt: list[int]) -> str:
        return "".join([piece async for piece in async_engine.stream(prompt, params)])

    async def use() -> list:
        tasks = [asyncio.create_task(async_engine.generate(*request)) for request in requests]
        tasks += [asyncio.create_task(collect(prompt)) for prompt in ([7] * 20, POISON[0])]
        return await asyncio.gather(*tasks, return_exceptions=True)

    others = list(zip(PROMPTS, PARAMS, strict=True))
    requests = [*others, POISON, *others]
    monkeypatch.setattr(llm, "_overlap", overlap)
    failures = poison(llm, monkeypatch, what)
    *results, text, poisoned_text = asyncio.run(use())
    poisoned = results.pop(len(others))
    assert tokens_of(results) == expected * 2
    assert text == results[1]["text"]
    assert isinstance(poisoned_text, torch.OutOfMemoryError)
    if what == "look":
        assert len(poisoned["token_ids"]) == 20  # nobody looked while it grew
    else:
        assert isinstance(poisoned, torch.OutOfMemoryError)
    assert len(failures) < 16
    asyncio.run(idle(async_engine))
    assert_empty(llm)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("what", ["launching", "decoding", "find_stop", "result"])
def test_a_request_that_fails_is_the_only_one_of_generate_from_that_does(
    engine, expected, monkeypatch, what, overlap
):
    others = list(zip(PROMPTS, PARAMS, strict=True))
    requests = [([], PARAMS[0]), *others, tuple(POISON), ("x", None), *others, "no tuple"]
    monkeypatch.setattr(engine, "_overlap", overlap)
    failures = poison(engine, monkeypatch, what)
    found = dict(engine.generate_from(requests, return_exceptions=True))
    assert sorted(found) == list(range(len(requests)))
    results = [found[i] for i in range(len(requests))]
    assert [str(results.pop(i))[:16] for i in (11, 6, 5, 0)] == [
        "requests[11] mus",
        "sampling_params ",
        "too much",
        "prompts[0] is em",
    ]
    assert tokens_of(results) == expected * 2
    assert len(failures) <= (5 if what == "decoding" else 1)  # they come one at a time, for want of room
    assert_empty(engine)


@pytest.mark.parametrize("culprits", [[25], [3, 25, 26, 39]], ids=str)
def test_the_first_culprit_of_a_step_is_found_at_the_second_failure_and_then_one_a_failure(
    folder, monkeypatch, culprits
):
    params = SamplingParams(0, 20, True)
    prompts = [POISON[0] if i in culprits else [i] * 3 for i in range(40)]
    with LLM(folder, **EXACT, num_kvcache_blocks=200) as llm:
        expected = tokens_of(llm.generate(prompts, params, use_tqdm=False))
        failures = poison(llm, monkeypatch, "launching")
        found = dict(llm.generate_from([(prompt, params) for prompt in prompts], return_exceptions=True))
        assert all(isinstance(found.pop(i), torch.OutOfMemoryError) for i in culprits)
        assert len(failures) == 1 + len(culprits)
        assert all(result["token_ids"] == expected[i] for i, result in found.items())


def test_what_fails_whatever_runs_is_raised_to_all(engine, monkeypatch):
    def failing():
        failures.append(len(failures))
        raise MemoryError("there is none left")

    failures = []
    monkeypatch.setattr(engine.scheduler, "schedule", failing)
    with pytest.raises(MemoryError, match="none left"):
        list(engine.generate_from(zip(PROMPTS, PARAMS, strict=True), return_exceptions=True))
    assert len(failures) < 12
    monkeypatch.setattr(engine.model_runner, "reset", failing)
    with pytest.raises(EngineDeadError, match="none left"):
        list(engine.generate_from(zip(PROMPTS, PARAMS, strict=True), return_exceptions=True))
    monkeypatch.undo()
    assert tokens_of(engine.generate(PROMPTS[1:2], PARAMS[1:2], use_tqdm=False))
    assert_empty(engine)


@pytest.mark.parametrize("phase", ["start", "prefill", "decode"])
def test_when_memory_runs_out_the_message_says_what_to_lower(folder, engine, monkeypatch, phase):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    hint = r"CUDA out of memory\..*gpu_memory_utilization \(now 0\.9\).*max_num_batched_tokens \(now \d+\)"
    if phase == "start":
        monkeypatch.setattr("nanovllm.engine.model_runner.load_model", fail)
        with pytest.raises(torch.OutOfMemoryError, match=hint):
            LLM(folder, **EXACT)
        return
    monkeypatch.setattr(engine.model_runner, "prepare_prefill" if phase == "prefill" else "run_model", fail)
    with pytest.raises(torch.OutOfMemoryError, match=hint):
        engine.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert_empty(engine)


def test_engines_one_after_another_leave_nothing_behind(folder):
    """Neither memory nor threads nor open files."""

    def use() -> list[list[int]]:
        with LLM(folder, **EXACT, num_kvcache_blocks=20) as llm:
            return tokens_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False))

    expected = use()
    for _ in range(4):
        use()
    gc.collect()
    before = resident_bytes(), threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        assert use() == expected
    gc.collect()
    assert resident_bytes() - before[0] < 16 << 20  # it goes up and down by half of that
    assert threading.active_count() == before[1]
    assert len(os.listdir("/proc/self/fd")) == before[2]


@pytest.mark.slow
def test_a_soak_keeps_memory_and_tokens(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3", vocab_size=257)
    compared, growth = soak(str(folder), 100, 0, report=lambda _: None)
    assert compared > 30
    assert growth < 24 << 20  # oneDNN keeps code for each number of rows that comes up for the first time
