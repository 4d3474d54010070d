"""The way of a GPU on a CPU: decode steps are replayed from recordings, which see nothing but tensors, and
each is launched before the tokens of the one before it are known. Requests want all that there is to want.
"""

import random

import pytest
import recorded_graphs
import torch
from engines import assert_empty, tokens_of

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.engine.batch import StepOutput
from nanovllm.engine.memory import largest_batch
from nanovllm.extensions.prefixes import planner
from tiny_checkpoints import EXACT, make_checkpoint, one_thread  # noqa: F401

WORDS = StructuredOutputsParams(regex="([a-z][0-9])*")
KINDS = [
    dict(),
    dict(logit_bias={3: 4.0, 70: -2.0}),
    dict(frequency_penalty=0.7, repetition_penalty=1.3, logprobs=2),
    dict(top_k=9, top_p=0.9),
    dict(structured_outputs=WORDS),
    dict(logprobs=1, prompt_logprobs=0),
    dict(structured_outputs=WORDS, bad_words=["a"], presence_penalty=0.5, min_p=0.01, logprobs=3),
    dict(allowed_token_ids=[*range(40, 90)], min_tokens=4),
    dict(temperature=0),
]
MODES = {
    "plain": {},
    "preemption": dict(num_kvcache_blocks=30),
    "chunks": dict(max_num_batched_tokens=48),
    "few slots": dict(max_num_seqs=5),
    "alone": dict(enable_prefix_caching=False),
}


def make_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """The first of them, plain, run alone for a while; many begin with the same document."""
    pick = random.Random(5)
    document = [pick.randrange(256) for _ in range(70)]
    prompts, params = [], []
    for i in range(2 * len(KINDS)):
        begin = document if i % 3 else []
        prompts.append(begin + [pick.randrange(256) for _ in range(pick.randrange(1, 20))])
        options = (
            dict(temperature=0.8, seed=i, max_tokens=12 + i % 7, ignore_eos=True) | KINDS[i % len(KINDS)]
        )
        params.append(SamplingParams(**options))
    return prompts, params


PROMPTS, PARAMS = make_requests()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=2, num_hidden_layers=1))


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch, no_forecast) -> None:
    for name in ("MIN_SHARED_TOKENS", "MIN_PREFIX_SAVED", "MIN_SAVED_TOKENS", "MIN_ITEM_TOKENS", "ITEM_STEP"):
        monkeypatch.setattr(planner, name, 16)


@pytest.fixture(scope="module")
def expected(folder) -> list[dict]:
    """Of the plain loop."""
    with LLM(folder, **EXACT, num_kvcache_blocks=300) as llm:
        return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def told(results: list[dict]) -> list:
    """Everything that results tell but log-probabilities' last digits."""
    tokens = tokens_of(results)
    ranks = [[[*entries] for entries in result.get("logprobs") or ()] for result in results]
    return [tokens, ranks]


def make(folder: str, patch: pytest.MonkeyPatch, **options) -> tuple[LLM, recorded_graphs.RecordedGraphs]:
    llm = LLM(folder, **EXACT | dict(num_kvcache_blocks=300, max_num_seqs=16) | options)
    return llm, recorded_graphs.install(llm, patch)


@pytest.mark.parametrize("mode", MODES)
def test_recorded_steps_tell_what_the_plain_loop_tells(folder, expected, monkeypatch, mode):
    llm, graphs = make(folder, monkeypatch, **MODES[mode])
    with llm:
        for _ in range(2):  # the second time nearly all graphs are there
            assert told(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == told(expected)
            assert_empty(llm)
        stats = llm.stats()
        plans = {plan for _, plan, _ in llm.model_runner.decoded}
        assert {*map(len, graphs.graphs)} == {1, 2} and graphs.num_replays > len(graphs.graphs)
        assert plans == ({False} if mode == "alone" else {False, True})
        assert (stats["num_grouped_tokens"] > 0) == (mode != "alone")
        assert (stats["num_preemptions"] > 0) == (mode == "preemption")


FAULTS = ["replay", "capture", "receive", "run_model", "to_host", "postprocess", "host_input", "record"]


@pytest.mark.parametrize("name", FAULTS)
def test_after_an_error_at_any_place_steps_go_on_and_tell_the_same(folder, expected, monkeypatch, name):
    """Whatever a step that failed has left in the tables and in the graphs' memory."""
    llm, graphs = make(folder, monkeypatch, num_kvcache_blocks=34)
    with llm:
        runner, of_name = llm.model_runner, llm.parts.logits_processor
        target = {
            "replay": graphs,
            "capture": graphs,
            "to_host": StepOutput,
            "postprocess": llm.scheduler,
            "host_input": of_name("bitmask"),
            "record": of_name("logprobs"),
        }.get(name, runner)
        function, calls, failures = getattr(target, name), 0, 0

        def fails_now_and_then(*args, **kwargs):
            nonlocal calls
            calls += 1
            result = function(*args, **kwargs)
            if calls in (2, 9, 10, 23):
                raise RuntimeError("injected")  # what was enqueued is done all the same
            return result

        monkeypatch.setattr(target, name, fails_now_and_then)
        ids = [llm.add_request(*request) for request in zip(PROMPTS, PARAMS, strict=True)]
        found = {}
        while not llm.is_finished():
            try:
                found.update(llm.step()[0])
            except RuntimeError as error:
                assert "injected" in str(error)
                failures += 1
        assert [found[i] for i in ids] == tokens_of(expected)
        assert failures
        assert_empty(llm)


def test_the_largest_steps_of_the_warm_up_leave_nothing_behind(folder, expected, monkeypatch):
    llm, _ = make(folder, monkeypatch)
    with llm, torch.inference_mode():
        runner = llm.model_runner
        batch = largest_batch(llm.config, llm.config.max_num_batched_tokens, llm.parts.logits_processors)
        assert batch.num_sequences == 16 and runner.run(batch) is not None
        for wanted in (batch.wanted, batch.wanted | runner.waiting):
            runner.decode_step((16, runner.backend.largest_plan, wanted))()
        runner.slots.reset()
        assert told(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == told(expected)
