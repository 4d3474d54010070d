"""Sampling: greedy where it should be, the right distribution elsewhere, and nothing depends on neighbours.

Everything is drawn from fixed seeds, so no test is a matter of luck. The bounds on chi-squared are six
standard deviations above its mean: a wrong distribution exceeds them by far.
"""

import math

import pytest
import torch
from sampling_checks import COUNT, RANDOM_SEEDS, assert_follows

from nanovllm import LLM, SamplingParams
from nanovllm.layers.sampler import Sampler, SamplingStep
from tiny_checkpoints import EXACT, assert_greedy, load_reference, make_checkpoint, one_thread  # noqa: F401


def draw(logits, temperature=1.0, seeds=0, positions=0, count=None) -> torch.Tensor:
    """Token ids for `count` rows; what is given once counts for every row."""
    if logits.dim() == 1:
        logits = logits.expand(count, -1)
    count = len(logits)
    step = SamplingStep(
        torch.arange(count, dtype=torch.int32),
        torch.as_tensor(temperature, dtype=torch.float32).expand(count).contiguous(),
        torch.as_tensor(seeds, dtype=torch.int64).expand(count).contiguous(),
        torch.as_tensor(positions, dtype=torch.int64).expand(count).contiguous(),
    )
    return Sampler()(logits, step)


def some_logits(vocab: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


WAYS = {
    "seeds as requests get them": (RANDOM_SEEDS, 0),
    "consecutive seeds": (torch.arange(COUNT), 17),
    "seeds that differ in the high bits": (torch.arange(COUNT) << 40, 17),
    "consecutive positions": (12345, torch.arange(COUNT)),
    "seeds and positions that grow together": (torch.arange(COUNT), torch.arange(COUNT)),
}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_follow_softmax_of_the_logits_over_the_temperature(way, temperature):
    logits = some_logits(40)
    seeds, positions = WAYS[way]
    tokens = draw(logits, temperature, seeds, positions, COUNT)
    assert_follows(tokens, (logits / temperature).softmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_of_half_precision_logits_follow_softmax_too(dtype):
    logits = some_logits(40).to(dtype)
    assert_follows(draw(logits, 0.8, RANDOM_SEEDS, 3, COUNT), (logits.float() / 0.8).softmax(-1))


def test_a_large_vocabulary_is_drawn_from_evenly():
    """Every token of 150,000 alike: no part of the vocabulary, and no remainder of its ids, is preferred."""
    vocab, count = 150_000, 1000
    tokens = draw(torch.zeros(vocab), 1.0, RANDOM_SEEDS[:count], 5, count)
    assert_follows(tokens // (vocab // 50), torch.ones(50))
    assert_follows(tokens % 16, torch.ones(16))
    assert len(tokens.unique()) > 980


@pytest.mark.parametrize("pair", ["next position", "next seed", "swapped"])
def test_draws_that_lie_next_to_each_other_are_independent(pair):
    logits = some_logits(8, spread=0.5)
    p = logits.softmax(-1)
    seeds, positions = torch.arange(COUNT) * 2, torch.arange(COUNT) % 97 * 2
    first = draw(logits, 1.0, seeds, positions, COUNT)
    if pair == "next position":
        second = draw(logits, 1.0, seeds, positions + 1, COUNT)
    elif pair == "next seed":
        second = draw(logits, 1.0, seeds + 1, positions, COUNT)
    else:
        first = draw(logits, 1.0, seeds, seeds + 1, COUNT)
        second = draw(logits, 1.0, seeds + 1, seeds, COUNT)
    assert_follows(first * 8 + second, torch.outer(p, p).flatten())


def test_a_draw_depends_on_its_own_row_alone():
    count = 64
    logits = torch.randn(count, 500, generator=torch.Generator().manual_seed(1))
    temperatures = torch.linspace(0, 2, count)
    seeds, positions = RANDOM_SEEDS[:count], torch.arange(count)
    together = draw(logits, temperatures, seeds, positions)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(2))
    assert torch.equal(
        draw(logits[order], temperatures[order], seeds[order], positions[order]), together[order]
    )
    for i in range(count):
        alone = draw(logits[i : i + 1], temperatures[i], seeds[i], positions[i])
        assert alone.item() == together[i].item()


def test_the_same_seed_and_position_draw_the_same_token_and_others_do_not():
    logits = torch.zeros(1000)
    tokens = draw(logits, 1.0, 7, 3, 50)
    assert len(tokens.unique()) == 1
    assert len(draw(logits, 1.0, 7, torch.arange(50), 50).unique()) > 40
    assert len(draw(logits, 1.0, torch.arange(50), 3, 50).unique()) > 40


def test_the_sampler_ignores_and_leaves_alone_the_global_generator():
    logits = some_logits(50)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = draw(logits, 1.0, RANDOM_SEEDS[:100], 0, 100)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(draw(logits, 1.0, RANDOM_SEEDS[:100], 0, 100), first)


def test_logits_are_not_changed():
    logits = torch.randn(4, 30)
    before = logits.clone()
    draw(logits, torch.tensor([0.0, 1.0, 0.5, 2.0]), RANDOM_SEEDS[:4], 0)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperature_zero_takes_the_best_token(dtype):
    logits = torch.randn(100, 300, generator=torch.Generator().manual_seed(3)).to(dtype)
    tokens = draw(logits, 0.0, RANDOM_SEEDS[:100], torch.arange(100))
    assert tokens.dtype == torch.int64 and tokens.shape == (100,)
    assert torch.equal(logits.float().gather(1, tokens[:, None])[:, 0], logits.float().amax(-1))


def test_greedy_and_sampled_rows_share_a_batch():
    logits = some_logits(40).expand(COUNT, -1)
    temperatures = torch.arange(COUNT) % 2 * 1.0
    tokens = draw(logits, temperatures, RANDOM_SEEDS, 0)
    assert set(tokens[::2].tolist()) == {int(logits[0].argmax())}
    assert_follows(tokens[1::2], logits[0].softmax(-1))


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-20, 1e-30])
def test_tiny_temperatures_are_greedy(temperature):
    logits = torch.randn(50, 200, generator=torch.Generator().manual_seed(4)) * 5
    logits[:, 3] = 0.0
    best = logits.topk(2).values
    clear = (best[:, 0] - best[:, 1]) > 0.1
    tokens = draw(logits, temperature, RANDOM_SEEDS[:50], 0)
    assert torch.equal(tokens[clear], logits.argmax(-1)[clear])


@pytest.mark.parametrize("temperature", [1e6, 1e30, 1e39, 1e300])
def test_huge_temperatures_are_uniform(temperature):
    tokens = draw(some_logits(20), temperature, RANDOM_SEEDS, 0, COUNT)
    assert_follows(tokens, torch.ones(20))


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((20,), -math.inf)
    logits[[3, 11]] = torch.tensor([0.0, 1.0])
    for temperature in (0.0, 0.5, 1.0, 100.0):
        tokens = draw(logits, temperature, RANDOM_SEEDS[:2000], 0, 2000)
        assert set(tokens.tolist()) <= {3, 11}


def test_large_logits_do_not_overflow():
    logits = torch.tensor([3e4, 3e4 - 1, -3e4, 1e4])
    assert_follows(draw(logits, 1.0, RANDOM_SEEDS, 0, COUNT), logits.double().softmax(-1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), tokenizer=False, num_hidden_layers=1)


def sample_with(folder, prompts, params, seed=0, **options) -> list[list[int]]:
    with LLM(str(folder), **EXACT, **{"num_kvcache_blocks": 200, "seed": seed, **options}) as llm:
        return [result["token_ids"] for result in llm.generate(prompts, params, use_tqdm=False)]


def test_the_engine_draws_from_the_models_distribution(folder):
    prompt = [5, 6, 7]
    with torch.no_grad():
        logits = load_reference(folder)(input_ids=torch.tensor([prompt])).logits[0, -1]
    for temperature in (0.6, 1.5):
        params = SamplingParams(temperature=temperature, max_tokens=1, ignore_eos=True)
        tokens = sample_with(folder, [prompt] * 1500, params, num_kvcache_blocks=600)
        assert_follows(torch.tensor(tokens), (logits / temperature).softmax(-1))


def test_equal_requests_in_one_call_are_drawn_apart(folder):
    completions = sample_with(folder, [[1, 2, 3]] * 20, SamplingParams(1.0, 8, True))
    assert len({tuple(tokens) for tokens in completions}) > 10


def test_the_engines_seed_makes_runs_repeatable(folder):
    prompts, params = [[i, i + 1] for i in range(8)], SamplingParams(1.0, 12, True)
    first = sample_with(folder, prompts, params, seed=3)
    assert sample_with(folder, prompts, params, seed=3) == first
    assert sample_with(folder, prompts, params, seed=4) != first
    assert sample_with(folder, prompts, params, seed=None) != sample_with(folder, prompts, params, seed=None)


def test_a_second_call_draws_anew(folder):
    params = SamplingParams(1.0, 12, True)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=50, seed=0) as llm:
        first, second = (llm.generate([[1, 2]], params, use_tqdm=False)[0]["token_ids"] for _ in range(2))
    assert first != second


def test_a_sampled_completion_does_not_depend_on_its_neighbours(folder):
    prompts, params = [[i, 3, 5] for i in range(6)], SamplingParams(1.0, 20, True)
    assert sample_with(folder, prompts[:1], params) == sample_with(folder, prompts, params)[:1]


@pytest.mark.parametrize(
    "options",
    [
        dict(num_kvcache_blocks=7),  # preemption
        dict(max_num_batched_tokens=20),  # chunks
        dict(max_num_seqs=1),
        dict(enable_prefix_caching=False),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_forecast")
def test_sampled_completions_do_not_depend_on_the_schedule(folder, options):
    prompts = [[*range(10, 42), i] for i in range(5)]
    params = SamplingParams(0.9, 24, True)
    assert sample_with(folder, prompts, params, **options) == sample_with(folder, prompts, params)


@pytest.mark.parametrize("temperature", [1e-10, 1e-37, 1e-38, 1e-40, 1e-46, 1e-300])
def test_a_temperature_too_small_for_float32_is_greedy_or_refused(folder, temperature):
    try:
        params = SamplingParams(temperature, 20, True)
    except ValueError:
        return
    (completion,) = sample_with(folder, [[1, 2, 3]], params)
    assert_greedy(load_reference(folder), [1, 2, 3], completion)


def test_greedy_and_sampled_requests_share_a_call(folder):
    reference = load_reference(folder)
    prompts = [[i, 3, 5] for i in range(6)]
    params = [SamplingParams(i % 2 * 1.0, 20, True) for i in range(6)]
    completions = sample_with(folder, prompts, params)
    for i in (0, 2, 4):
        assert_greedy(reference, prompts[i], completions[i])
    for i in (1, 3, 5):
        with pytest.raises(AssertionError):
            assert_greedy(reference, prompts[i], completions[i])
