"""The whole engine: whatever schedule, cache and company, a request's tokens are those of the plain case.

What transformers says of each completion is asked once per architecture, and again only of another one.
"""

import gc
import random
import weakref
from itertools import chain
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from engines import Watch, assert_empty, tokens_of
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm import LLM, SamplingParams
from nanovllm.config import DTYPES
from nanovllm.engine.kv_cache import KVCache
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.extensions.int8_cache.layout import Int8Layout
from nanovllm.extensions.prefixes.kernels.copy_pages import copy_blocks
from nanovllm.extensions.safety.options import ExtendedConfig
from nanovllm.kernels.kv_store import CacheLayout
from nanovllm.layers.attention import Attention
from tiny_checkpoints import (
    ARCHITECTURES,
    EXACT,
    assert_greedy,
    edit_json,
    load_reference,
    make_checkpoint,
    one_thread,  # noqa: F401
    reference_greedy,
)

COUNT = 18
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
LENGTHS = (1, 15, 16, 17, 32, 33, 64, 90)


def make_prompts() -> list[list[int]]:
    """Prompts of many lengths, some with a common beginning, and two that are the same."""
    pick = random.Random(0)
    shared = [pick.randrange(256) for _ in range(100)]
    prompts = [[pick.randrange(256) for _ in range(length)] for length in LENGTHS]
    prompts += [[*shared[:48], 1], [*shared[:48], 2, 3], shared[:64], shared[:64], shared[:100]]
    return prompts


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request, tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, seed=5, head_dim=24)
    reference, right = load_reference(folder), {}

    def check(prompt: list[int], tokens: list[int]) -> None:
        if right.get(tuple(prompt)) != tokens:
            assert len(tokens) == COUNT
            assert_greedy(reference, prompt, tokens)
            right[tuple(prompt)] = tokens

    return SimpleNamespace(folder=str(folder), prompts=make_prompts(), check=check)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=1)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), **EXACT, num_kvcache_blocks=64) as engine:
        yield engine


MODES = {
    "plain": dict(num_kvcache_blocks=200),
    "one at a time": dict(num_kvcache_blocks=200, max_num_seqs=1),
    "preempted": dict(num_kvcache_blocks=12),
    "chunked": dict(num_kvcache_blocks=200, max_num_batched_tokens=16),
    "chunks across blocks": dict(num_kvcache_blocks=200, max_num_batched_tokens=23),
    "preempted and chunked": dict(num_kvcache_blocks=11, max_num_batched_tokens=20, max_num_seqs=9),
    "without prefix caching": dict(num_kvcache_blocks=200, enable_prefix_caching=False),
    "preempted without prefix caching": dict(num_kvcache_blocks=12, enable_prefix_caching=False),
    "large blocks": dict(num_kvcache_blocks=20, kvcache_block_size=256),
    "odd blocks": dict(num_kvcache_blocks=60, kvcache_block_size=48),
    "cache chosen by the engine": dict(max_num_seqs=4),
}


# Architecture, mode, overlapped: every mode of one, the hardest mode of each, and those that windows change.
RUNS = [("qwen3", mode, True) for mode in MODES] + [("qwen3", "preempted and chunked", False)]
RUNS += [(name, "preempted and chunked", True) for name in ARCHITECTURES if name != "qwen3"]
for windowed in ("gemma3", "gpt_oss"):
    RUNS += [(windowed, "without prefix caching", False), (windowed, "chunks across blocks", False)]
    RUNS += [(windowed, "preempted without prefix caching", True), (windowed, "odd blocks", True)]


@pytest.mark.parametrize("model, mode, overlap", sorted(RUNS), indirect=["model"])
@pytest.mark.usefixtures("no_forecast")
def test_every_mode_gives_the_tokens_of_transformers(model, mode, overlap):
    """Overlapped is how a GPU is driven: a step is scheduled before the last one's tokens are known."""
    with LLM(model.folder, **{**EXACT, **MODES[mode]}) as llm, Watch(llm) as seen:
        assert not llm._overlap
        llm._overlap = overlap
        first = tokens_of(llm.generate(model.prompts, GREEDY, use_tqdm=False))
        assert_empty(llm)
        again = tokens_of(llm.generate(model.prompts[::3], GREEDY, use_tqdm=False))
        assert_empty(llm)
    for prompt, tokens in zip(model.prompts, first, strict=True):
        model.check(prompt, tokens)
    assert again == first[::3]
    assert (seen.preemptions > 0) == ("preempted" in mode)
    assert (seen.chunks > 0) == ("chunk" in mode)
    assert (max(seen.cached) > 0) == ("without prefix caching" not in mode)
    assert seen.most_tokens <= llm.config.max_num_batched_tokens
    assert seen.most_running <= llm.config.max_num_seqs


UNLIKE = pytest.mark.parametrize(
    "model", ["qwen3", "gpt_oss"], indirect=True
)  # without windows and with them


@UNLIKE
def test_requests_that_arrive_while_others_run_get_the_same_tokens(model):
    with LLM(model.folder, **EXACT, num_kvcache_blocks=20, max_num_batched_tokens=64) as llm:
        pick, waiting = random.Random(0), list(enumerate(model.prompts))
        place, completions = {}, {}
        while waiting or not llm.is_finished():
            if waiting and (llm.is_finished() or len(completions) % 2 == 0 or pick.random() < 0.3):
                i, prompt = waiting.pop(0)
                place[llm.add_request(prompt, GREEDY)] = i
            finished, _ = llm.step()
            for seq_id, token_ids in finished:
                completions[place[seq_id]] = list(token_ids)
        assert_empty(llm)
    for i, prompt in enumerate(model.prompts):
        model.check(prompt, completions[i])


@UNLIKE
def test_two_engines_with_unlike_blocks_do_not_disturb_each_other(model):
    options = [dict(EXACT, num_kvcache_blocks=14), dict(EXACT, num_kvcache_blocks=6, kvcache_block_size=64)]
    with LLM(model.folder, **options[0]) as first, LLM(model.folder, **options[1]) as second:
        engines = (first, second)
        places = [
            {llm.add_request(prompt, GREEDY): i for i, prompt in enumerate(model.prompts)} for llm in engines
        ]
        completions: tuple[dict, dict] = ({}, {})
        while not all(llm.is_finished() for llm in engines):
            for llm, place, results in zip(engines, places, completions, strict=True):
                for seq_id, token_ids in llm.step()[0]:
                    results[place[seq_id]] = list(token_ids)
        for results in completions:
            for i, prompt in enumerate(model.prompts):
                model.check(prompt, results[i])
        first.exit()
        (result,) = second.generate([model.prompts[3]], GREEDY, use_tqdm=False)
        model.check(model.prompts[3], result["token_ids"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kv_cache_may_have_another_dtype_than_the_model(folder, dtype):
    """A wider cache changes nothing, another only rounds: seen in chunks of a prompt and when decoding."""
    prompts, found = [list(range(50)), list(range(40, 57))], {}
    params = SamplingParams(0, 6, True, logprobs=1, prompt_logprobs=1, allowed_token_ids=[65])
    options = {**EXACT, "dtype": dtype, "num_kvcache_blocks": 12, "max_num_batched_tokens": 24}
    for cache_dtype in ("auto", *DTYPES):
        with LLM(str(folder), **options, kv_cache_dtype=cache_dtype) as llm:
            expected = getattr(torch, dtype if cache_dtype == "auto" else cache_dtype)
            assert llm.model_runner.kv_cache.pages[0].dtype == expected
            found[cache_dtype] = llm.generate(prompts, params, use_tqdm=False)
    assert found["auto"] == found[dtype] == found["float32"]
    for result, exact in zip(chain(*found.values()), found["auto"] * len(found), strict=True):
        for kind in ("prompt_logprobs", "logprobs"):
            pairs = zip(result[kind], exact[kind], strict=True)
            drawn = [(next(iter(one.values())), next(iter(other.values()))) for one, other in pairs if one]
            assert len(drawn) >= 6
            for one, other in drawn:
                assert one.logprob == pytest.approx(other.logprob, abs=0.05)


@pytest.fixture(scope="module")
def answers_of_8_bits(folder):
    with LLM(str(folder), **EXACT, num_kvcache_blocks=200, kv_cache_dtype="int8") as llm:
        return tokens_of(llm.generate(make_prompts(), GREEDY, use_tqdm=False))


IN_8_BITS = "one at a time", "chunks across blocks", "odd blocks", "preempted and chunked"


@pytest.mark.parametrize("mode", [*IN_8_BITS, "preempted without prefix caching"])
@pytest.mark.usefixtures("no_forecast")
def test_every_mode_gives_the_same_tokens_from_an_8_bit_cache(folder, answers_of_8_bits, mode):
    """Keys and values of the step itself are rounded too, so it does not matter which are in the cache."""
    with LLM(str(folder), **{**EXACT, **MODES[mode]}, kv_cache_dtype="int8") as llm, Watch(llm) as seen:
        llm._overlap = True
        assert tokens_of(llm.generate(make_prompts(), GREEDY, use_tqdm=False)) == answers_of_8_bits
        assert_empty(llm)
    assert (seen.preemptions > 0) == ("preempted" in mode)
    assert (max(seen.cached) > 0) == ("without prefix caching" not in mode)


def test_scores_from_an_8_bit_cache_depend_on_no_chunk_and_no_prefix(folder):
    """Apart from a number that rounding in float32 moves over the border of a step."""
    prompt, params = make_prompts()[7], SamplingParams(0, 3, True, prompt_logprobs=0)
    options = {**EXACT, "num_kvcache_blocks": 40, "kv_cache_dtype": "int8"}
    found = []
    for unlike in ({}, dict(max_num_batched_tokens=23), dict(kvcache_block_size=64)):
        with LLM(str(folder), **options | unlike) as llm:
            llm.generate([prompt[:50]], params, use_tqdm=False)
            (result,) = llm.generate([prompt], params, use_tqdm=False)
            logprobs = zip(result["prompt_logprobs"][1:], prompt[1:], strict=True)
            found.append([ranked[token].logprob for ranked, token in logprobs])
            (scored,) = llm.score([prompt], use_tqdm=False)
            found.append(scored["token_logprobs"][1:])
    for logprobs in found:
        assert logprobs == pytest.approx(found[0], abs=1e-3)


def test_an_8_bit_cache_takes_a_byte_an_element_and_two_more_a_vector(folder):
    size, room = {}, {}
    for dtype in ("float32", "int8"):
        with LLM(str(folder), **EXACT, num_kvcache_blocks=8, kv_cache_dtype=dtype) as llm:
            cache, head_dim = llm.model_runner.kv_cache, llm.config.hf_config.head_dim
            assert llm.stats()["num_kv_cache_tokens"] == 8 * 16
            size[dtype], room[dtype] = cache.pages[0].nbytes, cache.num_blocks_in(1 << 24)
    vectors = 2 * 2 * 2 * 8 * 16  # keys and values, layers, heads, tokens
    assert size == {"float32": 4 * head_dim * vectors, "int8": (head_dim + 2) * vectors}
    assert room == {dtype: (1 << 24) // (size[dtype] // 8) for dtype in room}


def test_copies_of_8_bit_blocks_hold_the_tokens_that_are_asked_for(folder):
    with LLM(str(folder), **EXACT, num_kvcache_blocks=8, kv_cache_dtype="int8") as llm:
        cache = llm.model_runner.kv_cache
        (pages,) = cache.pages
        pages.random_(256)
        before = pages.clone()
        copy_blocks(cache, torch.tensor([(0, 3, 1), (5, 2, 16)]))
        assert torch.equal(pages[:, :, [3, 2]], before[:, :, [0, 5]])
        others = [0, 1, 4, 5, 6, 7]
        assert torch.equal(pages[:, :, others], before[:, :, others])


@pytest.mark.parametrize("dtype, token_bytes", [("float32", 4 * 2 * (64 + 32)), ("int8", 2 * 2 * 36 + 68)])
def test_layers_with_other_heads_have_a_cache_of_their_own(dtype, token_bytes):
    """With the same numbers of blocks: two layers of 2 heads of 16, and between them one of 1 head of 32."""
    options = dict(dtype="float32", kvcache_block_size=16, kv_cache_dtype=dtype)
    config = ExtendedConfig("a model", device="cpu", **options)
    layers = [Attention(4, head_dim, 1.0, heads) for heads, head_dim in ((2, 16), (1, 32), (2, 16))]
    layout = Int8Layout() if dtype == "int8" else CacheLayout(torch.float32)
    cache = KVCache(config, layers, torch.device("cpu"), layout)
    strides = [layer.k_cache.stride() for layer in layers]  # kernels are compiled for them ahead
    cache.allocate(6)
    assert [layer.k_cache.stride() for layer in layers] == strides
    assert cache.block_bytes == 16 * token_bytes == sum(pages.nbytes for pages in cache.pages) // 6
    assert [page.data_ptr() for page in (layers[0].k_cache, layers[2].k_cache)] == [
        pages.data_ptr() for pages in cache.pages[0][0]
    ]
    for layer in layers:
        assert layout.page_sizes(layer.k_cache, layer.head_dim) == (16, layer.num_kv_heads)
        for part in (layer.k_cache, layer.v_cache):
            part.copy_(torch.arange(part.numel()).view(part.shape) % 251)
    before = [layer.v_cache[1].clone() for layer in layers]
    copy_blocks(cache, torch.tensor([(1, 4, 16)]))
    for layer, expected in zip(layers, before, strict=True):
        assert torch.equal(layer.v_cache[4], expected)


def test_identical_prompts_in_one_call_are_computed_once(llm):
    prompt = [9, *range(64)]
    with Watch(llm) as seen:
        results = llm.generate([prompt] * 5, SamplingParams(0, 8, True), use_tqdm=False)
    assert seen.cached == [0, 64, 64, 64, 64]
    assert tokens_of(results) == tokens_of(results[:1]) * 5
    assert [result["num_cached_tokens"] for result in results] == seen.cached


def test_a_second_call_finds_the_prompt_and_the_completion_of_the_first(llm):
    prompt = [8, *range(40)]
    (result,) = llm.generate([prompt], SamplingParams(0, 30, True), use_tqdm=False)
    with Watch(llm) as seen:
        llm.generate([[*prompt, *result["token_ids"], 5]], SamplingParams(0, 4, True), use_tqdm=False)
    assert seen.cached == [70], "41 + 30 tokens, of which the last was never computed"


def test_results_come_in_the_order_of_the_prompts_whenever_they_end(llm):
    params = [SamplingParams(0, count, True) for count in (20, 1, 7, 3, 12)]
    prompts = [[i, i] for i in range(5)]
    results = llm.generate(prompts, params, use_tqdm=False)
    assert [len(tokens) for tokens in tokens_of(results)] == [20, 1, 7, 3, 12]
    for prompt, param, result in zip(prompts, params, results, strict=True):
        assert tokens_of(llm.generate([prompt], param, use_tqdm=False)) == tokens_of([result])


def test_one_prompt_may_come_without_a_list(llm):
    params = SamplingParams(0, 5, True)
    for prompt in ("hello", [1, 2, 3]):
        alone, listed = (llm.generate(prompts, params, use_tqdm=False) for prompts in (prompt, [prompt]))
        assert tokens_of(alone) == tokens_of(listed)


def test_text_and_token_ids_of_the_same_prompt_are_the_same_request(llm):
    params = SamplingParams(0, 12, True)
    ids = llm.tokenizer.encode("What is it?")
    by_text, by_ids = llm.generate(["What is it?", ids], params, use_tqdm=False)
    assert by_text == by_ids
    assert by_text["text"] == llm.tokenizer.decode(by_text["token_ids"], skip_special_tokens=True)


def test_an_empty_list_of_prompts_gives_an_empty_list(llm):
    assert llm.generate([], SamplingParams(), use_tqdm=False) == []
    assert llm.generate([], [], use_tqdm=True) == []


def test_token_ids_of_numpy_are_integers_too(llm):
    numpy = pytest.importorskip("numpy")
    params = SamplingParams(0, 4, True)
    prompt = list(numpy.arange(5))
    expected = llm.generate([list(range(5))], params, use_tqdm=False)
    assert tokens_of(llm.generate([prompt], params, use_tqdm=False)) == tokens_of(expected)


def test_what_comes_out_is_plain_python(llm):
    (result,) = llm.generate([[1, 2, 3]], SamplingParams(0, 4, True), use_tqdm=False)
    assert type(result["text"]) is str and type(result["token_ids"]) is list
    assert all(type(token) is int for token in result["token_ids"])


def test_the_prompts_of_the_caller_are_left_alone(llm):
    prompts = [[1, 2, 3], [4, 5]]
    llm.generate(prompts, SamplingParams(0, 4, True), use_tqdm=False)
    assert prompts == [[1, 2, 3], [4, 5]]


def test_default_parameters_are_the_published_ones():
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (1.0, 64, False)
    assert SamplingParams(0.5, 7, True) == SamplingParams(temperature=0.5, max_tokens=7, ignore_eos=True)
    assert issubclass(LLM, LLMEngine)


def test_the_options_of_the_engine_have_the_published_defaults(folder):
    with LLM(str(folder), device="cpu") as llm:
        config = llm.config
        expected = dict(
            max_num_batched_tokens=16384,
            max_num_seqs=512,
            gpu_memory_utilization=0.9,
            tensor_parallel_size=1,
            enforce_eager=False,
            kvcache_block_size=256,
        )
        assert {name: getattr(config, name) for name in expected} == expected
        assert config.max_model_len == 512, "4096, capped by the checkpoint"
        assert config.num_kvcache_blocks == len(llm.scheduler.block_manager.blocks) >= 2


def test_the_step_reports_finished_requests_and_counts_tokens(llm):
    ids = [llm.add_request([5, 6, 7], SamplingParams(0, count, True)) for count in (1, 2)]
    assert not llm.is_finished()
    finished, num_tokens = llm.step()
    assert num_tokens == 6 and [seq_id for seq_id, _ in finished] == ids[:1]
    finished, num_tokens = llm.step()
    assert num_tokens == -1 and [seq_id for seq_id, _ in finished] == ids[1:]
    assert len(finished[0][1]) == 2
    assert llm.is_finished()
    assert_empty(llm)


def test_the_progress_bar_counts_finished_prompts_and_shows_speed(llm, capsys):
    llm.generate([[1, 2, 3], [4, 5]], SamplingParams(0, 4, True), use_tqdm=True)
    shown = capsys.readouterr().err
    assert "2/2" in shown and "Prefill" in shown and "Decode" in shown and "tok/s" in shown
    llm.generate([[1, 2, 3]], SamplingParams(0, 4, True), use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_a_chat_is_the_template_and_then_a_completion(llm):
    params = SamplingParams(0, 6, True)
    chat = [{"role": "user", "content": "hi"}]
    text = llm.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    expected = llm.generate([text], params, use_tqdm=False)
    assert tokens_of(llm.chat(chat, params, use_tqdm=False)) == tokens_of(expected)
    assert len(llm.chat([chat, chat], params, use_tqdm=False)) == 2


def first_time(tokens: list[int], least: int) -> int:
    """A place at or after `least` whose token did not come before."""
    return next(i for i in range(least, len(tokens)) if tokens[i] not in tokens[:i])


@pytest.mark.parametrize("place", ["config.json", "generation_config.json", "list", "tokenizer", "both"])
def test_every_end_of_sequence_token_ends_a_sequence(tmp_path, place):
    folder = make_checkpoint(tmp_path, "qwen3", seed=1)
    prompt = [1, 2, 3]
    tokens = reference_greedy(load_reference(folder), prompt, 60)
    at = first_time(tokens, 5)
    eos = tokens[at]
    if place == "config.json":
        edit_json(folder / "config.json", eos_token_id=eos)
    elif place == "generation_config.json":
        edit_json(folder / "generation_config.json", eos_token_id=eos)
    elif place == "list":
        edit_json(folder / "generation_config.json", eos_token_id=[256, eos])
    elif place == "both":
        edit_json(folder / "config.json", eos_token_id=256)
        edit_json(folder / "generation_config.json", eos_token_id=[256, 255, eos])
    with LLM(str(folder), **EXACT, num_kvcache_blocks=16) as llm:
        if place == "tokenizer":
            eos = llm.tokenizer.eos_token_id
            assert eos in (llm.config.eos if not isinstance(llm.config.eos, int) else (llm.config.eos,))
            return
        ends, goes_on = (
            llm.generate([prompt], SamplingParams(0, 60, ignore), use_tqdm=False)[0]
            for ignore in (False, True)
        )
        assert ends["token_ids"] == tokens[: at + 1]
        assert goes_on["token_ids"] == tokens


def test_a_sequence_that_ends_early_frees_its_place_for_the_next(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3", seed=1, tokenizer=False)
    tokens = reference_greedy(load_reference(folder), [1, 2, 3], 60)
    at = first_time(tokens, 5)
    edit_json(folder / "config.json", eos_token_id=tokens[at])
    with LLM(str(folder), **EXACT, num_kvcache_blocks=8, max_num_seqs=2) as llm:
        results = llm.generate([[1, 2, 3]] * 5, SamplingParams(0, 60), use_tqdm=False)
        assert tokens_of(results) == [tokens[: at + 1]] * 5
        assert_empty(llm)


def test_text_leaves_out_special_tokens(llm):
    """The end token, which the model here always ranks first, is in token_ids and not in the text."""
    end, vocab = llm.tokenizer.eos_token_id, llm.config.hf_config.vocab_size
    with mock.patch.object(llm.model_runner.model, "compute_logits", lambda hidden: torch.eye(vocab)[[end]]):
        (result,) = llm.generate(["abc"], SamplingParams(0, 3, True), use_tqdm=False)
        assert (result["token_ids"], result["text"]) == ([end] * 3, "")
        (result,) = llm.generate(["abc"], SamplingParams(0, 3), use_tqdm=False)
        assert (result["token_ids"], result["text"]) == ([end], "")


def test_a_checkpoint_without_a_tokenizer_serves_token_ids_and_refuses_text(tmp_path):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=8) as llm:
        with pytest.raises(ValueError, match="tokenizer"):
            llm.generate(["hello"], SamplingParams(0, 4), use_tqdm=False)
        (result,) = llm.generate([[1, 2, 3]], SamplingParams(0, 4, True), use_tqdm=False)
        assert result["text"] == "" and len(result["token_ids"]) == 4


def test_a_request_may_fill_the_model_length_and_the_pool_exactly(folder):
    reference = load_reference(folder)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=8, max_model_len=128) as llm:
        for length in (1, 64, 127):
            prompt = [i % 250 for i in range(length)]
            (result,) = llm.generate([prompt], SamplingParams(0, 128 - length, True), use_tqdm=False)
            assert len(result["token_ids"]) == 128 - length
            assert_greedy(reference, prompt, result["token_ids"])


def test_the_model_length_can_be_lowered_but_not_raised_above_the_checkpoints(folder):
    for asked, given in ((100, 100), (512, 512), (100000, 512)):
        with LLM(str(folder), **EXACT, num_kvcache_blocks=40, max_model_len=asked) as llm:
            assert llm.config.max_model_len == given
            params = SamplingParams(0, 2, True)
            assert len(llm.generate([[1] * (given - 2)], params, use_tqdm=False)[0]["token_ids"]) == 2
            limit = f"max_model_len is {given}, and the checkpoint's own limit 512"
            with pytest.raises(ValueError, match=limit):
                llm.generate([[1] * given], params, use_tqdm=False)


def test_a_with_statement_shuts_the_engine_down(folder):
    with LLM(str(folder), **EXACT, num_kvcache_blocks=8) as llm:
        assert isinstance(llm, LLM)
    with pytest.raises(RuntimeError, match="exit"):
        llm.generate([[1]], SamplingParams(0, 1), use_tqdm=False)


def test_clear_drops_all_requests_wherever_they_are(folder):
    prompts = [[1, 2, 3], [4] * 40, [5] * 20]
    with LLM(str(folder), **EXACT, num_kvcache_blocks=20, max_num_seqs=2) as llm:
        expected = tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False))
        for num_steps in range(4):
            for prompt in prompts:
                llm.add_request(prompt, GREEDY)
            for _ in range(num_steps):
                llm.step()
            llm.clear()
            assert_empty(llm)
            assert llm.step() == ([], 0)
        assert tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected


def test_exit_may_be_called_twice_and_use_after_it_is_a_clear_error(folder):
    llm = LLM(str(folder), **EXACT, num_kvcache_blocks=8)
    llm.exit()
    llm.exit()
    for use in (
        lambda: llm.generate([[1]], SamplingParams(0, 1), use_tqdm=False),
        lambda: llm.generate([], SamplingParams(0, 1), use_tqdm=False),
        lambda: llm.add_request([1], SamplingParams(0, 1)),
        lambda: llm.step(),
        lambda: llm.chat([{"role": "user", "content": "hi"}], SamplingParams(0, 1), use_tqdm=False),
    ):
        with pytest.raises(RuntimeError, match="exit"):
            use()


def test_exit_in_the_middle_of_requests_is_fine(folder):
    llm = LLM(str(folder), **EXACT, num_kvcache_blocks=8)
    llm.add_request([1, 2, 3], SamplingParams(0, 8))
    llm.step()
    llm.exit()
    with LLM(str(folder), **EXACT, num_kvcache_blocks=8) as other:
        assert len(other.generate([[1]], SamplingParams(0, 1), use_tqdm=False)) == 1


@pytest.mark.parametrize("how", ["exit", "del"])
def test_the_model_and_the_cache_are_freed_with_the_engine(folder, how):
    llm = LLM(str(folder), **EXACT, num_kvcache_blocks=8)
    llm.generate([[1, 2, 3]], SamplingParams(0, 4), use_tqdm=False)
    runner = llm.model_runner
    parts = [weakref.ref(runner.model), weakref.ref(runner.kv_cache.pages[0])]
    del runner
    if how == "exit":
        llm.exit()
    else:
        del llm
    gc.collect()
    assert [part() for part in parts] == [None, None]


def test_engines_leave_torch_as_they_found_it(folder):
    before = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    with LLM(str(folder), **{**EXACT, "dtype": "bfloat16"}, num_kvcache_blocks=8) as llm:
        assert (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()) == before
        llm.generate([[1]], SamplingParams(0, 1), use_tqdm=False)
    assert (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()) == before


class CountOperations(TorchDispatchMode):
    """Counts torch's operations, views too."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += 1
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_sequence_takes_few_operations_a_layer(tmp_path, dtype):
    """On a CPU each takes a microsecond or two, which for a small model is as much as its products."""
    counts = []
    for num_layers in (1, 3):
        folder = make_checkpoint(tmp_path / str(num_layers), "llama", num_hidden_layers=num_layers)
        with LLM(str(folder), **EXACT | {"dtype": dtype}, num_kvcache_blocks=8) as llm:
            llm.add_request([5] * 20, GREEDY)
            for _ in range(3):
                llm.step()
            with CountOperations() as operations:
                llm.step()
            counts.append(operations.count)
    assert (counts[1] - counts[0]) / 2 <= 64
