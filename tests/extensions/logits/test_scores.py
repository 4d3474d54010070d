"""Scores of the tokens that are asked for, where the KV cache has what comes before them."""

import random
from unittest import mock

import numpy as np
import pytest
import torch
from engines import Watch, assert_empty
from logit_settings import SCHEDULES, expected_logprobs

from nanovllm import LLM, SamplingParams
from nanovllm.extensions.text.results import make_score
from tiny_checkpoints import EXACT, load_reference, make_checkpoint, one_thread  # noqa: F401

PICK = random.Random(0)
CONTEXT = [PICK.randrange(300) for _ in range(150)]
CONTINUATIONS = [[1, 2, 3], [1, 2, 4, 5], [7], [8, 9]]
PROMPTS = [CONTEXT + each for each in CONTINUATIONS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=1))


@pytest.fixture(scope="module")
def reference(folder):
    return load_reference(folder)


@pytest.fixture(scope="module", params=[16, 256])
def llm(request, folder):
    with LLM(folder, **EXACT | dict(kvcache_block_size=request.param), num_kvcache_blocks=40) as engine:
        yield engine


def assert_scores(results, prompts, first_tokens, reference) -> None:
    """Log-probabilities and ranks from these tokens on are transformers' own, and nothing else is told."""
    for result, prompt, first in zip(results, prompts, first_tokens, strict=True):
        first = max(first, 1)
        logprobs = expected_logprobs(reference, prompt)[:-1]
        scored = logprobs.gather(1, torch.tensor([prompt[1:]]).T)[first - 1 :]
        ranks = (logprobs[first - 1 :] > scored).sum(1) + 1
        assert result["token_ids"] == prompt
        assert result["token_logprobs"][:first] == result["token_ranks"][:first] == [None] * first
        assert result["token_logprobs"][first:] == pytest.approx(scored[:, 0].tolist(), abs=1e-4)
        assert result["token_ranks"][first:] == ranks.tolist()
        assert result["logprob"] == pytest.approx(scored.sum().item(), abs=2e-4 * len(prompt))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.usefixtures("no_forecast")
def test_scores_from_a_token_on_are_those_of_transformers(folder, reference, name):
    """Wherever in a block or in a chunk it is, and while other requests run."""
    prompts = [*PROMPTS, CONTEXT[:70], CONTEXT[:33], CONTEXT, [3]]
    first_tokens = [150, 140, 0, 16, 17, 33, 149, 1]
    with LLM(folder, **EXACT, **{**SCHEDULES[name], "num_kvcache_blocks": 12}) as llm:
        llm._overlap = True
        for _ in range(2):
            assert_scores(llm.score(prompts, False, first_tokens), prompts, first_tokens, reference)
        assert_empty(llm)


def test_continuations_of_one_context_compute_it_once(llm, reference):
    """But for its last token, from which the first score comes. In one step only whole blocks are shared."""
    prompts = [[6, *prompt] for prompt in PROMPTS]
    with Watch(llm) as seen:
        results = llm.score(prompts, False, len(CONTEXT) + 1)
    assert_scores(results, prompts, [len(CONTEXT) + 1] * 4, reference)
    in_one_step = llm.config.kvcache_block_size == 16
    assert seen.cached == [0] + [144 if in_one_step else 150] * 3
    assert [count for _, count in seen.steps if count] == ([4] if in_one_step else [1, 3])


def test_what_a_completion_has_computed_is_not_computed_for_scores_again(llm, reference):
    prompt = [5, *CONTEXT]
    [completed] = llm.generate([prompt], SamplingParams(0, 20, True), use_tqdm=False)
    text = prompt + completed["token_ids"]
    with Watch(llm) as seen:
        results = llm.score([text], False, len(prompt))
    assert_scores(results, [text], [len(prompt)], reference)
    assert set(results[0]["token_ranks"][len(prompt) :]) == {1}  # greedy tokens
    assert seen.cached == [len(prompt) - 1]


@pytest.mark.parametrize("num_steps", range(4))
def test_a_step_that_fails_is_made_up_for(folder, reference, num_steps, monkeypatch):
    """Before, between and after the chunks that have scored tokens."""
    with LLM(folder, **EXACT, num_kvcache_blocks=20, max_num_batched_tokens=30) as llm:
        [(token_ids, request)] = llm.prompts.read_scored([CONTEXT], 40)
        llm.queue(request)
        for _ in range(num_steps):
            llm.step()
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(llm.model_runner, "run_model", mock.Mock(side_effect=MemoryError))
            llm.step()
        while not llm.is_finished():
            llm.step()
        assert_scores([make_score(token_ids, request)], [CONTEXT], [40], reference)
        assert_empty(llm)


def test_scores_without_a_first_token_are_of_the_whole_text(llm, reference):
    llm.score(PROMPTS, False, len(CONTEXT))  # into the cache
    assert_scores(llm.score(PROMPTS, False), PROMPTS, [1] * 4, reference)


def test_a_first_token_behind_the_last_scores_nothing(llm):
    [result] = llm.score([1, 2, 3], False, np.int64(3))
    assert result["token_logprobs"] == result["token_ranks"] == [None] * 3 and result["logprob"] == 0


@pytest.mark.parametrize("from_token", [-1, 4, 1.0, True, None, "1", [1, 5], [[1], 1]], ids=str)
def test_a_first_token_that_the_text_does_not_have_is_refused(llm, from_token):
    with pytest.raises(ValueError, match=r"from_token must be an integer from 0 to 3, .*prompts.*, got"):
        llm.score([[1, 2, 3]] * 2, False, from_token)
    assert_empty(llm)


def test_there_is_a_first_token_for_each_text(llm):
    with pytest.raises(ValueError, match="there are 2 prompts but 3 from_token"):
        llm.score([[1, 2, 3]] * 2, False, [1, 1, 1])
