"""Models against transformers: the same logits, and the same greedy tokens through the whole engine.

Each case is a small random checkpoint. Sizes, biases, tying, rotary settings follow from the case's number,
so that the cases of an architecture together meet every group size from 1 to 8, every rope type in every
spelling, tied and untied embeddings, and heads larger and smaller than hidden_size / heads.
"""

import random
from itertools import product
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers

from nanovllm import LLM, SamplingParams
from nanovllm.extensions.products.kernels import fused_linear
from nanovllm.layers.rotary_embedding import get_rope
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.context import reset_context, set_context
from tiny_checkpoints import (
    ARCHITECTURES,
    EXACT,
    UNALIGNED,
    assert_greedy,
    edit_json,
    load_reference,
    make_checkpoint,
    make_config,
    one_thread,  # noqa: F401
    read_config,
    reference_greedy,
    spell_rope,
)

BOTH = True, False
IS_OLD = transformers.__version__ < "5"
WITHOUT_WINDOW = "llama", "glm4_moe", *(("qwen2_moe",) if IS_OLD else ())
CASES_PER_ARCHITECTURE = 17
WHOLE_ENGINE = 0, 2, 4, 6, 9, 11, 13, 15  # every group size, window, kind and place of experts, of layers
VOCAB = 320
COUNT = 40
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)

ROPES = [
    dict(),
    dict(rope_type="linear", factor=4.0),
    dict(
        rope_type="llama3",
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=128,
    ),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128),
    dict(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=128,
        beta_fast=16,
        beta_slow=2,
        truncate=False,
    ),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128, attention_factor=0.8),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128, mscale=0.7, mscale_all_dim=1.3),
]
SPELLINGS = ["rope_parameters", "rope_scaling", "type"]


def describe(architecture: str, number: int) -> tuple[dict, str]:
    """The checkpoint's settings, and the spelling of its rotary ones."""
    pick = random.Random(f"{architecture} {number}")
    group = 1 + number % 8
    kv_heads = pick.choice([1, 2] if group > 4 else [1, 2, 3])
    heads = group * kv_heads
    settings = dict(
        vocab_size=VOCAB + pick.choice([0, 1, 37]),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=heads * pick.choice([8, 12]) if heads > 2 else heads * 24,
        head_dim=pick.choice([8, 16, 20, 32]),
        intermediate_size=pick.choice([48, 96]),
        num_hidden_layers=pick.choice([1, 2, 3]),
        rms_norm_eps=pick.choice([1e-6, 1e-5]),
        tie_word_embeddings=number % 2 == 1,
        rope_theta=pick.choice([1000.0, 10000.0, 500000.0]),
    )
    # Of three and more cases of each architecture that has windows one has none.
    window = [None, 20, 33, 64][number % 4]
    if architecture in ("mistral", "gemma3"):
        settings["sliding_window"] = window or 512
    elif architecture not in WITHOUT_WINDOW and window:
        settings.update(use_sliding_window=True, sliding_window=window, max_window_layers=number % 3)
    if architecture == "gemma3":
        settings.update(query_pre_attn_scalar=pick.choice([8, 30]), sliding_window_pattern=1 + number % 3)
    if architecture not in ("qwen2", "mistral", "qwen2_moe"):
        settings["attention_bias"] = (number // 2) % 2 == 1
    if architecture == "smollm3":
        settings["no_rope_layer_interval"] = 1 + number % 3
        if number % 5 == 0:
            settings["no_rope_layers"] = [0, 1, 0][: settings["num_hidden_layers"]]
    if architecture in ("llama", "smollm3"):
        settings["mlp_bias"] = (number // 4) % 2 == 1
    if architecture == "glm4_moe":
        top_k, groups = 1 + number % 8, pick.choice([1, 2, 3])
        groups = 1 if IS_OLD else groups  # it may choose from other groups
        settings.update(
            num_experts_per_tok=top_k,
            n_group=groups,
            topk_group=(groups + 1) // 2,
            n_routed_experts=groups * max(2, top_k, pick.choice([4, 7])),
            n_shared_experts=1 + number % 2,
            moe_intermediate_size=pick.choice([16, 24, 40]),
            norm_topk_prob=(number // 8) % 2 == 0,
            routed_scaling_factor=pick.choice([1.0, 2.5]),
            num_hidden_layers=2 + number % 2,
            first_k_dense_replace=(number // 4) % 3,
            use_qk_norm=(number // 3) % 2 == 1,
            partial_rotary_factor=pick.choice([0.5, 0.5, 1.0]),
        )
    if architecture in ("qwen3_moe", "qwen2_moe"):
        top_k = 1 + number % 8
        settings.update(
            num_experts=max(top_k, pick.choice([4, 8, 11])),
            num_experts_per_tok=top_k,
            moe_intermediate_size=pick.choice([16, 24, 40]),
            norm_topk_prob=(number // 8) % 2 == 0,
            num_hidden_layers=2 + number % 2,
            decoder_sparse_step=1 + (number // 4) % 2,
            mlp_only_layers=[0] if number % 3 == 1 else [],
        )
    if architecture == "qwen2_moe":
        settings["shared_expert_intermediate_size"] = pick.choice([16, 40, 96])
        if IS_OLD:  # it has no `head_dim` for these
            del settings["head_dim"]
    if architecture == "gpt_oss":
        settings.update(
            num_local_experts=pick.choice([2, 4, 7]),
            num_experts_per_tok=1 + number % 2,
            sliding_window=pick.choice([5, 16, 40]),
            layer_types=None,
            num_hidden_layers=2 + number % 2,  # one layer alone has a window, and gives back its blocks
        )
    if rope := ROPES[number % len(ROPES)]:
        # transformers 5.23 looks for `truncate` beside the kinds of layers, where no file has it.
        left_out = {"truncate"} if architecture == "gemma3" else set()
        settings["rope_scaling"] = {key: value for key, value in rope.items() if key not in left_out}
    return settings, SPELLINGS[number % len(SPELLINGS)]


CASES = [(architecture, number) for architecture in ARCHITECTURES for number in range(CASES_PER_ARCHITECTURE)]


def name_of(case: tuple[str, int]) -> str:
    return f"{case[0]}-{case[1]}"


@pytest.fixture(scope="module", params=CASES, ids=name_of)
def case(request, tmp_path_factory):
    """A checkpoint, transformers' model of it, and an engine without room: little cache, short steps."""
    architecture, number = request.param
    settings, spelling = describe(architecture, number)
    folder = make_checkpoint(
        tmp_path_factory.mktemp("checkpoint"), architecture, seed=number, tokenizer=False, **settings
    )
    reference = load_reference(folder)
    spell_rope(folder, spelling)
    with LLM(
        str(folder),
        **EXACT,
        max_num_batched_tokens=48,
        max_num_seqs=6,
        num_kvcache_blocks=14,
        max_model_len=512,
    ) as llm:
        yield SimpleNamespace(llm=llm, reference=reference, seed=number, settings=settings)


def all_logits(llm: LLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Logits of every position of every prompt, from one prefill of them all; nothing is stored."""
    model = llm.model_runner.model
    lengths = [len(prompt) for prompt in prompts]
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    set_context(
        True,
        cu_seqlens_q=boundaries,
        cu_seqlens_k=boundaries,
        max_seqlen_q=max(lengths),
        max_seqlen_k=max(lengths),
        slot_mapping=torch.full((sum(lengths),), -1, dtype=torch.int32),
        context_lens=None,
        block_tables=None,
    )
    try:
        with torch.inference_mode():
            hidden = model(
                torch.tensor([token for prompt in prompts for token in prompt]),
                torch.cat([torch.arange(length) for length in lengths]),
            )
            logits = model.lm_head.logits(hidden)
            last = model.compute_logits(hidden)
    finally:
        reset_context()
    logits = logits.split(lengths)
    assert last.shape == (len(prompts), logits[0].shape[1])
    for row, of_prompt in zip(last, logits, strict=True):
        torch.testing.assert_close(row, of_prompt[-1], atol=1e-5, rtol=1e-5)
    return logits


def test_logits_are_those_of_transformers(case):
    pick = random.Random(case.seed)
    prompts = [[pick.randrange(VOCAB) for _ in range(length)] for length in (200, 1, 33)]
    for prompt, logits in zip(prompts, all_logits(case.llm, prompts), strict=True):
        with torch.no_grad():
            expected = case.reference(input_ids=torch.tensor([prompt])).logits[0]
        assert logits.shape == expected.shape
        assert expected.std() > 0.1, "logits so alike would show no difference"
        assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    "case", [case for case in CASES if case[1] in WHOLE_ENGINE], indirect=True, ids=name_of
)
@pytest.mark.usefixtures("no_forecast")
def test_greedy_tokens_are_those_of_transformers_through_the_whole_engine(case):
    """Preemption, chunked prefill, prefix hits and identical prompts, all of which must have happened."""
    pick = random.Random(case.seed)
    shared = [pick.randrange(VOCAB) for _ in range(32)]
    prompts = [[*shared[:begin], *(pick.randrange(VOCAB) for _ in range(rest))] for begin, rest in [
        (0, 1), (0, 16), (32, 1), (0, 100), (32, 9)
    ]]  # fmt: skip
    prompts.append(list(prompts[2]))
    scheduler = case.llm.scheduler
    seen = SimpleNamespace(cached=0, chunks=0)
    schedule = scheduler.schedule

    def watch():
        sequences, is_prefill = schedule()
        for sequence in sequences if is_prefill else ():
            seen.cached = max(seen.cached, sequence.num_cached_tokens)
            seen.chunks += sequence.num_computed_tokens + sequence.num_scheduled_tokens < len(sequence)
        return sequences, is_prefill

    with (
        mock.patch.object(scheduler, "schedule", watch),
        mock.patch.object(scheduler, "preempt", wraps=scheduler.preempt) as preempt,
    ):
        results = case.llm.generate(prompts, GREEDY, use_tqdm=False)
    assert preempt.call_count > 0 and seen.cached > 0 and seen.chunks > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result["token_ids"]) == COUNT
        assert_greedy(case.reference, prompt, result["token_ids"])
    assert results[5]["token_ids"] == results[2]["token_ids"]


def test_the_one_pass_check_of_greedy_tokens_agrees_with_plain_greedy_decoding(tmp_path):
    """The test above trusts `assert_greedy`: it takes transformers' own tokens and nothing else."""
    reference = load_reference(make_checkpoint(tmp_path, tokenizer=False))
    tokens = reference_greedy(reference, [1, 2, 3], 64)
    assert_greedy(reference, [1, 2, 3], tokens)
    for place in (0, 31, 63):
        changed = list(tokens)
        changed[place] = (changed[place] + 1) % VOCAB
        with pytest.raises(AssertionError, match="behind the best"):
            assert_greedy(reference, [1, 2, 3], changed)


def test_the_cases_meet_everything_that_they_claim():
    for count in (2, 3, 4, 8):  # what `describe` takes by turns
        assert {number % count for number in WHOLE_ENGINE} == set(range(count))
    for architecture in ARCHITECTURES:
        if IS_OLD and architecture in ("qwen2_moe", "glm4_moe"):
            continue  # less is possible there
        cases = [describe(architecture, number) for number in range(CASES_PER_ARCHITECTURE)]
        settings = [setting for setting, _ in cases]
        assert {s["num_attention_heads"] // s["num_key_value_heads"] for s in settings} == set(range(1, 9))
        assert {s["tie_word_embeddings"] for s in settings} == {True, False}
        natural = [s["hidden_size"] // s["num_attention_heads"] for s in settings]
        assert any(s["head_dim"] > n for s, n in zip(settings, natural, strict=True))
        assert any(s["head_dim"] < n for s, n in zip(settings, natural, strict=True))
        if architecture in ("qwen3_moe", "qwen2_moe"):
            assert {s["num_experts_per_tok"] for s in settings} == set(range(1, 9))
            assert {s["norm_topk_prob"] for s in settings} == {True, False}
            left_out = {(s["decoder_sparse_step"], *s["mlp_only_layers"]) for s in settings}
            assert left_out == {(1,), (2,), (1, 0), (2, 0)}
        if architecture == "glm4_moe":
            assert {(s["use_qk_norm"], s["attention_bias"]) for s in settings} == {*product(BOTH, BOTH)}
            assert {s["n_group"] for s in settings} == {1, 2, 3}
            assert {s["partial_rotary_factor"] for s in settings} == {0.5, 1.0}
        if architecture not in WITHOUT_WINDOW:
            windows = {5, 16, 40} if architecture == "gpt_oss" else {20, 33, 64}
            assert {s.get("sliding_window") for s in settings} >= windows
        ropes = {(s.get("rope_scaling", {}).get("rope_type", "default"), spelling) for s, spelling in cases}
        assert ropes >= {(kind, how) for kind in ("default", "linear", "llama3", "yarn") for how in SPELLINGS}


@pytest.mark.parametrize(
    "architecture, rope_type",
    [(name, ("longrope", "dynamic", "magic")[i % 3]) for i, name in enumerate(ARCHITECTURES)],
)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_unknown_rope_type_is_refused_by_name(tmp_path, architecture, spelling, rope_type):
    folder = make_checkpoint(tmp_path, architecture, tokenizer=False)
    spell_rope(folder, spelling)
    scaling = {"type" if spelling == "type" else "rope_type": rope_type, "factor": 2.0}
    if spelling == "rope_parameters":
        edit_json(folder / "config.json", rope_parameters={"rope_theta": 10000.0, **scaling})
    else:
        edit_json(folder / "config.json", rope_scaling=scaling)
    with pytest.raises(ValueError, match=rope_type):
        LLM(str(folder), **EXACT)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "rope, trained",
    [
        (dict(rope_type="linear", factor=4.0), 64),
        (dict(rope_type="yarn", factor=4.0), 64),
        (dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64), 80),
    ],
    ids=["linear", "yarn", "yarn by Qwen's recipe"],
)
def test_a_scaled_model_is_that_of_transformers_beyond_its_first_length(
    tmp_path, architecture, rope, trained
):
    settings = dict(rope_scaling={**rope}, max_position_embeddings=trained)
    folder = make_checkpoint(tmp_path, architecture, tokenizer=False, **settings)
    reference = load_reference(folder)
    spell_rope(folder, "type")
    prompt = [i * 7 % VOCAB for i in range(150)]
    with LLM(str(folder), **EXACT, num_kvcache_blocks=16) as llm:
        assert llm.config.max_model_len == 256
        (result,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert_greedy(reference, prompt, result["token_ids"])


@pytest.mark.parametrize(
    "rope, max_position, limit",
    [
        (dict(), 4096, 4096),
        (dict(rope_type="linear", factor=4.0), 4096, 16384),
        (dict(rope_type="linear", factor=0.5), 4096, 4096),
        (dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768), 40960, 131072),
        (dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768), 131072, 131072),
        (
            dict(
                rope_type="llama3",
                factor=8.0,
                original_max_position_embeddings=8192,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
            ),
            131072,
            131072,
        ),
        (dict(rope_type="frequency_factors", factors=[8.0] * 64), 131072, 131072),
    ],
)
def test_the_context_is_what_the_scaling_extends_it_to(rope, max_position, limit):
    changes = dict(rope_parameters=None, rope_scaling=rope, max_position_embeddings=max_position)
    assert read_config(make_config("llama", head_dim=128), **changes).context_limit == limit


@pytest.mark.parametrize("missing", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_missing_rope_setting_is_named(tmp_path, missing):
    rope = dict(ROPES[2], rope_theta=10000.0)
    del rope[missing]
    folder = make_checkpoint(tmp_path, "llama", tokenizer=False)
    spell_rope(folder, "rope_parameters")
    edit_json(folder / "config.json", rope_parameters=rope)
    with pytest.raises(ValueError, match=missing):
        LLM(str(folder), **EXACT)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_the_dtype_is_the_checkpoints_in_either_spelling(tmp_path, key, name):
    folder = make_checkpoint(tmp_path, tokenizer=False, num_hidden_layers=1)
    edit_json(folder / "config.json", dtype=None, torch_dtype=None)
    edit_json(folder / "config.json", **{key: name})
    with LLM(str(folder), device="cpu", kvcache_block_size=16, num_kvcache_blocks=8) as llm:
        dtypes = {str(parameter.dtype) for parameter in llm.model_runner.model.parameters()}
        assert dtypes == {f"torch.{name}"}
        assert len(llm.generate([[1, 2, 3]], SamplingParams(0, 4, True), use_tqdm=False)[0]["token_ids"]) == 4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_config_without_head_dim_divides_the_hidden_size(tmp_path, architecture):
    folder = make_checkpoint(tmp_path, architecture, tokenizer=False, head_dim=16)
    reference = load_reference(folder)
    if architecture not in ("qwen3", "gemma3", "gpt_oss"):  # whose defaults are others
        edit_json(folder / "config.json", head_dim=None)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=8) as llm:
        (result,) = llm.generate([[1, 2, 3]], SamplingParams(0, 16, True), use_tqdm=False)
    assert_greedy(reference, [1, 2, 3], result["token_ids"])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tied_embeddings_are_stored_once(tmp_path, architecture):
    folder = make_checkpoint(tmp_path, architecture, tokenizer=False, tie_word_embeddings=True)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=8) as llm:
        model = llm.model_runner.model
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_bfloat16_stays_near_float32(tmp_path):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    prompts = [[i % VOCAB for i in range(100)], [7]]
    with LLM(str(folder), **EXACT, num_kvcache_blocks=8) as llm:
        expected = all_logits(llm, prompts)
    with LLM(str(folder), **{**EXACT, "dtype": "bfloat16"}, num_kvcache_blocks=8) as llm:
        rough = all_logits(llm, prompts)
    for a, b in zip(rough, expected, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.float() - b).abs().mean() < 0.03 * b.std()


@pytest.mark.parametrize("sizes", [{}, *UNALIGNED.values()], ids=["all aligned", *UNALIGNED])
def test_a_product_is_fused_only_if_the_copy_engine_can_read_its_rows(sizes):
    config = read_config(make_config(**sizes))
    matrices = [weight for weight in Qwen3ForCausalLM(config).model.layers.parameters() if weight.dim() == 2]
    fused = [fused_linear.can_fuse(config.hidden_size, weight.bfloat16()) for weight in matrices]
    assert fused == [weight.shape[1] % 8 == 0 for weight in matrices] and all(fused) == (not sizes)


PUBLISHED_ROPES = {
    "llama-3.1-8b": dict(
        rope_theta=500000.0,
        rope_scaling=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        max_position_embeddings=131072,
    ),
    "qwen3-8b-yarn": dict(
        rope_theta=1000000.0,
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
        max_position_embeddings=131072,
    ),
    "yarn-small-theta": dict(  # whose slowest dimension still turns several times
        rope_theta=100.0,
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8192),
        max_position_embeddings=32768,
    ),
    "linear": dict(
        rope_theta=10000.0, rope_scaling=dict(rope_type="linear", factor=4.0), max_position_embeddings=16384
    ),
    "default": dict(rope_theta=1000000.0, max_position_embeddings=40960),
}


@pytest.mark.parametrize("name", PUBLISHED_ROPES)
def test_rotary_tables_are_those_of_transformers_at_full_size(name):
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128, **PUBLISHED_ROPES[name]
    )
    length = 20000
    rope = get_rope(128, length, read_config(config).rope_parameters)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), torch.arange(length)[None])
    expected = torch.cat((cos[0, :, :64], sin[0, :, :64]), dim=-1)
    difference = (rope.cos_sin_cache - expected).abs()
    assert difference[:2000].max() < 1e-3 and difference.mean() < 1e-4
