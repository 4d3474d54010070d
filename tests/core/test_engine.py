"""The whole engine without extensions: whatever schedule, cache and company, a request's tokens are those of
the plain case; and after whatever goes wrong the engine is empty and right, or says why it has ended.
"""

import os
import random
import signal
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
from engines import Core, Watch, assert_empty, tokens_of

from nanovllm import SamplingParams
from tiny_checkpoints import (
    EXACT,
    assert_greedy,
    load_reference,
    make_checkpoint,
    one_thread,  # noqa: F401
    reference_greedy,
)

COUNT = 24
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint, and what transformers answers to prompts of many lengths, some of which begin alike."""
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=5, head_dim=24)
    pick, reference = random.Random(0), load_reference(folder)
    shared = [pick.randrange(256) for _ in range(100)]
    prompts = [[pick.randrange(256) for _ in range(length)] for length in (1, 15, 16, 17, 33, 90)]
    prompts += [[*shared[:48], 1], [*shared[:48], 2, 3], shared[:64], shared[:64], shared]
    answers = [reference_greedy(reference, prompt, COUNT) for prompt in prompts]
    return SimpleNamespace(folder=str(folder), reference=reference, prompts=prompts, answers=answers)


@pytest.fixture(scope="module")
def engine(model):
    with Core(model.folder, **EXACT, num_kvcache_blocks=64) as llm:
        yield llm


@pytest.fixture
def llm(engine, model):
    """An engine that must be empty and right after the test."""
    yield engine
    assert_empty(engine)
    assert_answers(model, engine.generate(model.prompts, GREEDY, use_tqdm=False))


def assert_answers(model, results) -> None:
    for prompt, tokens, answer in zip(model.prompts, tokens_of(results), model.answers, strict=True):
        if tokens != answer:  # allowed only where transformers sees a tie
            assert_greedy(model.reference, prompt, tokens)


MODES = {
    "plain": dict(num_kvcache_blocks=200),
    "one at a time": dict(num_kvcache_blocks=200, max_num_seqs=1),
    "preempted": dict(num_kvcache_blocks=12),
    "chunked": dict(num_kvcache_blocks=200, max_num_batched_tokens=23),
    "preempted and chunked": dict(num_kvcache_blocks=11, max_num_batched_tokens=20, max_num_seqs=9),
    "without prefix caching": dict(num_kvcache_blocks=200, enable_prefix_caching=False),
    "large blocks": dict(num_kvcache_blocks=20, kvcache_block_size=256),
    "cache chosen by the engine": dict(max_num_seqs=4),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_tokens_of_transformers(model, mode):
    """Overlapped is how a GPU is driven: a step is scheduled before the last one's tokens are known."""
    with Core(model.folder, **{**EXACT, **MODES[mode]}) as llm, Watch(llm) as seen:
        llm._overlap = mode not in ("one at a time", "preempted")
        assert_answers(model, llm.generate(model.prompts, GREEDY, use_tqdm=False))
        assert_empty(llm)
    assert (seen.preemptions > 0) == ("preempted" in mode)
    assert (seen.chunks > 0) == ("chunk" in mode)
    assert (max(seen.cached) > 0) == ("without" not in mode and "large" not in mode)
    assert seen.most_tokens <= llm.config.max_num_batched_tokens
    assert seen.most_running <= llm.config.max_num_seqs


def test_requests_that_arrive_while_others_run_get_the_same_tokens(model):
    with Core(model.folder, **EXACT, num_kvcache_blocks=20, max_num_batched_tokens=64) as llm:
        pick, waiting = random.Random(0), list(enumerate(model.prompts))
        place, results = {}, {}
        while waiting or not llm.is_finished():
            if waiting and (llm.is_finished() or pick.random() < 0.3):
                i, prompt = waiting.pop(0)
                place[llm.add_request(prompt, GREEDY)] = i
            finished, _ = llm.step()
            results.update((place[seq_id], {"token_ids": list(token_ids)}) for seq_id, token_ids in finished)
        assert_empty(llm)
    assert_answers(model, [results[i] for i in range(len(model.prompts))])


def test_a_common_beginning_is_computed_once_in_a_call_and_found_by_the_next(llm):
    prompt = [9, *range(64)]
    with Watch(llm) as seen:
        results = llm.generate([prompt] * 5, SamplingParams(0, 30, True), use_tqdm=False)
        longer = [*prompt, *results[0]["token_ids"], 5]
        (result,) = llm.generate([longer], SamplingParams(0, 8, True), use_tqdm=False)
    assert seen.cached == [0, 64, 64, 64, 64, 80], "whole blocks, of the completion too"
    assert tokens_of(results) == tokens_of(results[:1]) * 5
    assert [each["num_cached_tokens"] for each in [*results, result]] == seen.cached


def test_results_come_in_the_order_of_the_prompts_whenever_they_end(llm):
    params = [SamplingParams(0, count, True) for count in (20, 1, 7, 3, 12)]
    prompts = [[i, i] for i in range(4)] + ["text"]
    results = llm.generate(prompts, params, use_tqdm=False)
    assert [len(tokens) for tokens in tokens_of(results)] == [20, 1, 7, 3, 12]
    for prompt, param, result in zip(prompts, params, results, strict=True):
        (alone,) = llm.generate([prompt], param, use_tqdm=False)
        assert alone["token_ids"] == result["token_ids"] and alone["text"] == result["text"]
        assert result["text"] == llm.tokenizer.decode(result["token_ids"], skip_special_tokens=True)
    assert llm.generate([], use_tqdm=False) == []


def test_a_completion_says_why_it_ended(llm):
    (long,) = llm.generate([[3, 4]], SamplingParams(0, 20, True), use_tqdm=False)
    token = long["token_ids"][6]
    first = long["token_ids"].index(token)
    (short,) = llm.generate([[3, 4]], SamplingParams(0, 20, True, stop_token_ids=[token]), use_tqdm=False)
    assert (long["finish_reason"], len(long["token_ids"])) == ("length", 20)
    assert short["finish_reason"] == "stop" and short["token_ids"] == long["token_ids"][: first + 1]
    assert long["num_prompt_tokens"] == 2


def test_a_sampled_completion_depends_on_its_seed_and_on_nothing_else(llm, model):
    params = SamplingParams(0.8, 20, True, seed=3)
    (alone,) = llm.generate([[1, 2]], params, use_tqdm=False)
    others = [SamplingParams(1.0, 30, True)] * len(model.prompts)
    among = llm.generate([*model.prompts, [1, 2]], [*others, params], use_tqdm=False)[-1]
    (unlike,) = llm.generate([[1, 2]], SamplingParams(0.8, 20, True, seed=4), use_tqdm=False)
    assert among["token_ids"] == alone["token_ids"] != unlike["token_ids"]


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_an_aborted_request_frees_its_blocks_and_keeps_its_tokens(llm, steps):
    request, other = llm.add_request([1] * 40, GREEDY), llm.add_request([2] * 5, GREEDY)
    for _ in range(steps):
        llm.step()
    sequence = llm.unfinished[request]
    llm.abort(request)
    assert sequence.is_finished and not sequence.block_table and sequence.finish_reason == "abort"
    finished = [ended for _ in range(COUNT + 1) for ended in llm.step()[0]]
    assert [seq_id for seq_id, _ in finished] == [request, other]
    assert [len(tokens) for _, tokens in finished] == [steps, COUNT]
    llm.abort(request)  # ended already


BAD_CALLS = {
    "no token": lambda llm: llm.generate([[]], GREEDY),
    "a token id beyond the vocabulary": lambda llm: llm.generate([[320]], GREEDY),
    "a negative token id": lambda llm: llm.generate([[1], [-1]], GREEDY),
    "no room for a token": lambda llm: llm.generate([[1] * 512], GREEDY),
    "as many parameters as prompts": lambda llm: llm.generate([[1], [2]], [GREEDY]),
    "no parameters": lambda llm: llm.generate([[1]], [7]),
    "a number": lambda llm: llm.generate(7, GREEDY),
    "a field that only an extension serves": lambda llm: llm.generate([[1]], SamplingParams(top_p=0.5)),
    "a temperature below 0": lambda llm: llm.generate([[1]], SamplingParams(-1.0)),
    "no token to generate": lambda llm: llm.add_request([1], SamplingParams(max_tokens=0)),
}


def test_a_bad_call_is_refused_before_anything_changes(llm):
    for name, call in BAD_CALLS.items():
        with pytest.raises(ValueError):
            pytest.fail(f"{name} is not refused: {call(llm)}")
        assert_empty(llm)


def test_wrong_options_are_refused_by_name(model):
    wrong = dict(max_num_seqs=0, kvcache_block_size=17, device="tpu", gpu_memory_utilization=2.0)
    wrong |= dict(tensor_parallel_size=3, attention_backend="flash", load_format="bin", dtype="int3")
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            Core(model.folder, **{**EXACT, name: value})
    with pytest.raises(TypeError, match="max_seqs"):
        Core(model.folder, max_seqs=3)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["schedule", "postprocess", "call"])
def test_an_exception_inside_generate_leaves_the_engine_empty(llm, monkeypatch, error, method):
    target = llm.model_runner if method == "call" else llm.scheduler
    function, calls = getattr(target, method), iter(range(4))

    def failing(*args):
        if next(calls, None) is None:
            monkeypatch.undo()
            raise error("in the middle")
        return function(*args)

    monkeypatch.setattr(target, method, failing)
    with pytest.raises(error, match="in the middle"):
        llm.generate([[1, 2, 3], [4] * 50], GREEDY, use_tqdm=False)
    assert_empty(llm)


def test_exit_may_be_called_twice_and_use_after_it_is_a_clear_error(model):
    with Core(model.folder, **EXACT, num_kvcache_blocks=8) as llm:
        llm.add_request([1, 2], GREEDY)
    llm.exit()
    for use in (lambda: llm.generate([[1]], GREEDY), llm.step, lambda: llm.add_request([1], GREEDY)):
        with pytest.raises(RuntimeError, match="shut down"):
            use()


def test_two_ranks_give_the_tokens_of_one_and_the_end_of_a_rank_is_an_error_within_seconds(model):
    llm = Core(model.folder, **EXACT, num_kvcache_blocks=60, tensor_parallel_size=2)
    assert_answers(model, llm.generate(model.prompts, GREEDY, use_tqdm=False))
    assert_empty(llm)
    [process] = llm.ranks._processes
    started = time.monotonic()
    threading.Timer(0.3, os.kill, [process.pid, signal.SIGKILL]).start()
    with pytest.raises(RuntimeError, match="rank 1"):
        while True:
            llm.generate(model.prompts, GREEDY, use_tqdm=False)
    assert time.monotonic() - started < 5
    with pytest.raises(RuntimeError, match="rank 1"):
        llm.step()
    llm.exit()
    assert process.poll() is not None


def test_a_step_that_fails_drops_all_requests_at_the_next_call(llm, monkeypatch):
    for prompt in ([1, 2], [3]):
        llm.add_request(prompt, GREEDY)
    llm.step()
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(llm.model_runner, "run_model", mock.Mock(side_effect=MemoryError))
        llm.step()
    request_id = llm.add_request([4, 5], SamplingParams(0, 3, True))
    assert list(llm.unfinished) == [request_id]
    found = [ended for _ in range(3) for ended in llm.step()[0]]
    assert [(each, len(token_ids)) for each, token_ids in found] == [(request_id, 3)]
