"""Whatever goes wrong inside the engine, wherever: `generate` raises it, and the engine is empty and right.

Errors are injected into each method that a step goes through, in its first calls and in later ones, with
requests that use everything: shared and banned tokens, several completions, scores, stop texts.
"""

import gc
import os
import threading

import pytest
import torch
from soak import resident_bytes, soak
from test_engine import assert_empty, tokens_of

from checkpoints import EXACT, make_checkpoint, one_thread  # noqa: F401
from nanovllm import LLM, SamplingParams
from nanovllm.engine import completions, llm_engine
from nanovllm.engine.step_data import StepOutput

PROMPTS = [[*range(40)], [7] * 20, [*range(40)], [1, 2, 3]]
PARAMS = [
    SamplingParams(0, 30, True, frequency_penalty=0.5, logprobs=1, prompt_logprobs=0),
    SamplingParams(0, 20, True, n=2, stop="never\n seen"),
    SamplingParams(0, 30, True, logit_bias={3: 1.0}),
    SamplingParams(0, 25, True, top_k=3),
]
METHODS = {
    "scheduler": ["add", "schedule", "preempt", "advance", "postprocess", "_finish", "_release"],
    "block_manager": [
        "can_allocate",
        "allocate",
        "deallocate",
        "can_append",
        "may_append",
        "_take_free_block",
    ],
    "runner": [
        "prepare_prefill",
        "prepare_decode",
        "launch",
        "call",
        "prefill",
        "decode",
        "run_model",
        "_draw",
    ],
    "state": ["changes", "apply", "next_inputs", "feed"],
    "shaping": ["update", "write", "apply", "remember"],
    "model": ["forward", "compute_logits"],
    "engine": ["_enqueue", "_step", "_launch", "_collect", "_check_stop_texts"],
    "output": ["token_ids", "logprobs", "prompt_logprobs"],
    "text": ["find_stop"],
    "results": ["record_logprobs", "make_result"],
    "progress bar": ["update", "set_postfix"],
}
SITES = [(place, name) for place, names in METHODS.items() for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=1, vocab_size=257))


@pytest.fixture(scope="module")
def engine(folder):
    with LLM(folder, **EXACT, num_kvcache_blocks=8, max_num_batched_tokens=24) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(engine):
    results = engine.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert engine.scheduler.num_preemptions > 0, "the calls of a preemption are wanted too"
    return tokens_of(results)


def object_of(llm: LLM, place: str):
    runner = llm.model_runner
    return {
        "scheduler": llm.scheduler,
        "block_manager": llm.scheduler.block_manager,
        "runner": runner,
        "state": runner.state,
        "shaping": runner.shaping,
        "model": runner.model,
        "engine": llm,
        "output": StepOutput,
        "text": completions.GrowingText,
        "results": llm_engine,
        "progress bar": llm_engine.tqdm,
    }[place]


@pytest.mark.parametrize("place, name", SITES, ids=lambda x: x)
def test_an_error_at_any_call_is_raised_and_leaves_the_engine_right(
    engine, expected, monkeypatch, place, name
):
    target = object_of(engine, place)
    function = getattr(target, name)
    for number, error in enumerate(
        [MemoryError, RuntimeError("injected"), torch.OutOfMemoryError("injected")]
    ):
        count = 0

        def failing(*args, **kwargs):
            nonlocal count
            count += 1
            if count == 1 + number * number:  # noqa: B023
                raise error  # noqa: B023
            return function(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(engine, "_overlap", number != 1)
            patch.setattr(target, name, failing)
            try:
                engine.generate(PROMPTS, PARAMS, use_tqdm=place == "progress bar")
            except (MemoryError, RuntimeError) as raised:
                assert isinstance(raised, type(error) if isinstance(error, Exception) else error)
            else:
                assert count < 1 + number * number, "the error was swallowed"
                assert number, "never called"
        assert_empty(engine)
    assert tokens_of(engine.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected


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
    monkeypatch.setattr(engine.model_runner, "_begin_prefill" if phase == "prefill" else "run_model", fail)
    with pytest.raises(torch.OutOfMemoryError, match=hint):
        engine.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert_empty(engine)


def test_engines_one_after_another_leave_nothing_behind(folder):
    """Neither memory nor threads nor open files."""

    def use() -> list[list[int]]:
        with LLM(folder, **EXACT, num_kvcache_blocks=20) as llm:
            return tokens_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False))

    expected = use()
    for _ in range(9):
        use()
    gc.collect()
    before = resident_bytes(), threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(40):
        assert use() == expected
    gc.collect()
    assert resident_bytes() - before[0] < 16 << 20  # it goes up and down by half of that
    assert threading.active_count() == before[1]
    assert len(os.listdir("/proc/self/fd")) == before[2]


def test_a_soak_keeps_memory_and_tokens(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3", vocab_size=257)
    compared, growth = soak(str(folder), 100, 0, report=lambda _: None)
    assert compared > 30 and growth < 8 << 20
