"""Architectures that transformers builds: greedy tokens as by transformers itself, or a refusal by name."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from forked_ranks import forked_ranks  # noqa: F401
from open_checkpoints import open_checkpoint
from published_configs import PUBLISHED, make_published
from quantised_checkpoints import PACKERS, quantise
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.mpt import modeling_mpt
from transformers_checkpoints import (
    GREEDY,
    MIXED,
    PROMPTS,
    assert_answers_as_transformers,
    make,
    settings_of,
)

from nanovllm import LLM
from nanovllm.extensions.prefixes import planner
from nanovllm.extensions.transformers.config import REFUSED, VERIFIED, transformers_config
from nanovllm.extensions.transformers.faster import (
    GatedMLP,
    Linear,
    PlainExperts,
    replacement,
    rotates_halves,
)
from nanovllm.extensions.transformers.model import without_memory
from nanovllm.extensions.transformers.parts import make_attention
from nanovllm.layers.layernorm import RMSNorm
from tiny_checkpoints import (
    EXACT,
    assert_greedy,
    edit_json,
    load_reference,
    make_checkpoint,
    one_thread,  # noqa: F401
)


@pytest.mark.parametrize("kind", VERIFIED)
def test_greedy_tokens_are_those_of_transformers(tmp_path, kind):
    if kind not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not know it")
    assert_answers_as_transformers(make(kind, tmp_path))


@pytest.mark.parametrize("kind", VERIFIED)
def test_greedy_tokens_are_the_same_with_the_defaults_of_a_class(tmp_path, kind):
    if kind not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not know it")
    if not {*MIXED} & settings_of(kind) and not CONFIG_MAPPING[kind]().tie_word_embeddings:
        pytest.skip("these are what the other test has")
    assert_answers_as_transformers(make(kind, tmp_path, has_own_defaults=True))


@pytest.mark.parametrize("name", PUBLISHED)
def test_greedy_tokens_are_the_same_with_configurations_as_published(tmp_path, name):
    assert_answers_as_transformers(make_published(name, tmp_path))


@pytest.mark.parametrize(
    "kind, architectures",
    [
        ("phimoe", ["PhiMoEForCausalLM"]),
        ("internlm3", ["InternLM3ForCausalLM"]),
        ("olmo", []),
        ("olmo", None),
        ("llama", ["LLaMAForCausalLM"]),
        ("gemma3_text", None),
    ],
)
def test_the_model_type_decides_where_architectures_do_not(tmp_path, kind, architectures):
    """Names as remote code has them, or none."""
    folder = make(kind, tmp_path)
    edit_json(tmp_path / "config.json", architectures=architectures)
    assert_answers_as_transformers(folder)
    config = open_checkpoint(folder).hf_config()
    has_class = {"llama": ["LlamaForCausalLM"], "gemma3_text": ["Gemma3ForCausalLM"]}
    assert config.architectures == has_class.get(kind, [])


def test_a_mask_that_is_neither_causal_nor_of_a_window_is_refused_where_it_is_used(tmp_path):
    folder = make("qwen2_moe", tmp_path, use_sliding_window=False, layer_types=None)
    edit_json(tmp_path / "config.json", layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(
        ValueError, match="Qwen2MoeAttention is not supported: its mask is neither causal nor"
    ):
        LLM(str(folder), **EXACT, model_impl="transformers")


@pytest.mark.parametrize("name", ["fp8 tensor", "pack 4"])
def test_their_weights_may_be_quantised(tmp_path, name):
    floats, reference = make("olmo", tmp_path / "floats"), tmp_path / "reference"
    folder = quantise(floats, tmp_path / "packed", PACKERS[name], reference)
    assert_answers_as_transformers(folder, reference)


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_matrices_that_are_stored_transposed_are_quantised_as_others(tmp_path, quantization):
    folder = make("gpt2", tmp_path)
    options = EXACT | dict(num_kvcache_blocks=40)
    with LLM(str(folder), **options) as llm:
        exact = llm.score(PROMPTS, use_tqdm=False)
    with LLM(str(folder), **options, quantization=quantization) as llm:
        modules = llm.model_runner.model.named_modules()
        formats = {
            name: str(module.matrix.weight.dtype) for name, module in modules if hasattr(module, "matrix")
        }
        rounded = llm.score(PROMPTS, use_tqdm=False)
    assert {*formats.values()} == {"torch.float8_e4m3fn" if quantization == "fp8" else "torch.uint8"}
    for name in "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj":
        assert f"transformer.h.1.{name}" in formats
    for one, other in zip(exact, rounded, strict=True):
        assert one["logprob"] != other["logprob"] == pytest.approx(one["logprob"], rel=0.03)


def test_experts_that_only_transformers_computes_are_not_quantised(tmp_path):
    options = EXACT | dict(quantization="int4", model_impl="transformers")
    with pytest.raises(ValueError, match="model.layers.0.mlp.experts.gate_up_proj cannot be quantised"):
        LLM(str(make("gpt_oss", tmp_path)), **options)


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "granitemoe"])
def test_experts_are_quantised(tmp_path, kind):
    folder = make(kind, tmp_path, **{"moe_intermediate_size": 32} if kind == "deepseek_v3" else {})
    with LLM(str(folder), **EXACT, num_kvcache_blocks=40) as llm:
        exact = llm.score(PROMPTS, use_tqdm=False)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=40, quantization="fp8") as llm:
        experts = [each for each in llm.model_runner.model.modules() if isinstance(each, PlainExperts)]
        dtypes = {each.gate_up_proj.matrix.weight.dtype for each in experts}
        assert dtypes == {torch.float8_e4m3fn}
        rounded = llm.score(PROMPTS, use_tqdm=False)
    for one, other in zip(exact, rounded, strict=True):
        assert one["logprob"] != other["logprob"] == pytest.approx(one["logprob"], rel=0.05)


def test_with_an_8_bit_cache_tokens_are_nearly_as_likely(tmp_path):
    folder = make("olmo", tmp_path)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=40) as llm:
        exact = llm.score(PROMPTS, use_tqdm=False)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=40, kv_cache_dtype="int8") as llm:
        rounded = llm.score(PROMPTS, use_tqdm=False)
    for one, other in zip(exact, rounded, strict=True):
        assert one["logprob"] == pytest.approx(other["logprob"], abs=0.3)


@pytest.mark.parametrize(
    "kind, has_norms, has_networks, rotates",
    [("qwen3", True, True, True), ("gemma2", False, False, True), ("glm", True, False, False)],
)
def test_what_computes_the_same_as_a_faster_part_is_replaced(
    tmp_path, kind, has_norms, has_networks, rotates
):
    with LLM(str(make(kind, tmp_path)), **EXACT, num_kvcache_blocks=40, model_impl="transformers") as llm:
        modules = [*llm.model_runner.model.modules()]
    assert any(isinstance(module, RMSNorm) for module in modules) == has_norms
    assert any(isinstance(module, GatedMLP) for module in modules) == has_networks
    assert any("forward" in vars(module) for module in modules) == rotates


class OtherNorm(torch.nn.Module):
    """Almost an RMSNorm: `power` 2 and `shift` 0 would make it one."""

    def __init__(self, power: float, shift: float, eps: float = 1e-6):
        super().__init__()
        self.weight, self.power, self.shift, self.eps = torch.nn.Parameter(torch.ones(8)), power, shift, eps

    def forward(self, x):
        scale = (x.abs().pow(self.power).mean(-1, keepdim=True) + self.eps).rsqrt()
        return x * scale * (self.weight + self.shift)


@pytest.mark.parametrize("power, shift", [(2, 0), (2, 1), (1.9, 0)])
def test_a_norm_is_known_by_what_it_computes(power, shift):
    found = replacement(OtherNorm(power, shift))
    assert isinstance(found, RMSNorm) == ((power, shift) == (2, 0))


class OtherLinear(torch.nn.Linear):
    def __init__(self, factor: float):
        super().__init__(3, 2)
        self.factor = factor

    def forward(self, x):
        return x @ self.weight.T * self.factor + self.bias


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_linear_layer_is_known_by_what_it_computes(factor):
    assert isinstance(replacement(OtherLinear(factor)), Linear) == (factor == 1)


def test_products_of_falcon_may_be_quantised_and_its_heads_are_cached_once(tmp_path):
    folder = make_published("tiiuae/falcon-40b", tmp_path)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=40, quantization="int4") as llm:
        model = llm.model_runner.model
        found = [module.matrix.weight.dtype for module in model.modules() if hasattr(module, "matrix")]
    assert found.count(torch.uint8) == 8 and {each.num_kv_heads for each in model.attention} == {2}


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text"])
def test_layers_that_read_the_keys_and_values_of_another_have_no_cache_of_their_own(tmp_path, kind):
    """Two of four do, one of them with a window."""
    folder = make(kind, tmp_path)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=40) as llm:
        model, kv_cache = llm.model_runner.model, llm.model_runner.kv_cache
        sizes = [attention.num_kv_heads * attention.head_dim for attention in model.attention]
        windows = [attention.features["window"] for attention in model.attention]
    assert windows == [8, 0] and kv_cache.block_bytes == 16 * 4 * 2 * sum(sizes)


def test_layers_that_do_different_things_with_the_same_keys_and_values_have_each_a_cache():
    def layer(query, key, value, **options):
        options = {"sliding_window": 0, "scaling": 1.0} | options
        return make_attention(torch.nn.Module(), query, key, value, options)

    query, key, value = (torch.empty(1, 2, 3, 8, device="meta") for _ in range(3))
    first = layer(query, key, value)
    assert layer(query.clone(), key, value) is first
    others = [layer(query, key, value, sliding_window=8), layer(query, key, value, scaling=0.5)]
    others += [layer(query, key, value, softcap=2.0), layer(query, key, value.clone())]
    others += [layer(query, key.clone(), value), layer(query.repeat(1, 2, 1, 1), key, value), first]
    assert len({*others}) == 7


def test_masks_that_attention_does_not_need_take_no_memory(tmp_path):
    with LLM(str(make("gpt_neo", tmp_path)), **EXACT, num_kvcache_blocks=40) as llm:
        assert torch.bool not in {buffer.dtype for buffer in llm.model_runner.model.buffers()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_gates_are_those_of_gemma_3n_without_a_number_copied_to_the_device(
    tmp_path, dtype, monkeypatch
):
    """A CUDA graph could not record that. The device is "meta" here."""
    folder, options = make("gemma3n_text", tmp_path), EXACT | {"dtype": str(dtype)[6:]}
    with LLM(str(folder), **options, num_kvcache_blocks=40) as llm:
        mlp = llm.model_runner.model.lm_head.base.layers[0].mlp
    gates = torch.randn(3, 96, dtype=dtype)
    found, expected = mlp._gaussian_topk(gates), type(mlp)._gaussian_topk(mlp, gates)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert 0.01 < (found > 0).float().mean() < 0.2
    make_tensor, devices = torch.tensor, set()

    def watch(value, dtype, device):
        devices.add(torch.device(device).type)
        return make_tensor(value, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "tensor", watch)
    assert mlp._gaussian_topk(gates.to("meta")).is_meta and devices == {"cpu"}


def test_tokens_beyond_the_table_of_each_layer_are_looked_up_as_the_first(tmp_path):
    """Some versions of transformers do so themselves, others look them up where there is no memory."""
    with LLM(str(make("gemma3n_text", tmp_path)), **EXACT, num_kvcache_blocks=40) as llm:
        table = llm.model_runner.model.lm_head.base.embed_tokens_per_layer
    tokens = torch.tensor([0, 7, 299, 300, 319])  # of 300 and 320
    torch.testing.assert_close(table(tokens), table(torch.tensor([0, 7, 299, 0, 0])))
    assert not table(tokens[:3]).eq(table(tokens[3:4])).all(1)[1:].any()


class OtherMLP(torch.nn.Module):
    def __init__(self, act_fn):
        super().__init__()
        self.gate_proj, self.up_proj = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(8, 16, bias=False)
        self.down_proj, self.act_fn = torch.nn.Linear(16, 8, bias=False), act_fn

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("act_fn", [torch.nn.SiLU(), torch.nn.GELU()])
def test_a_network_is_known_by_what_it_computes(act_fn):
    assert isinstance(replacement(OtherMLP(act_fn)), GatedMLP) == isinstance(act_fn, torch.nn.SiLU)


class SwappedMLP(OtherMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


def test_a_network_whose_gates_are_what_they_should_multiply_is_another():
    assert replacement(SwappedMLP(torch.nn.SiLU())) is None


def test_a_rotation_is_known_by_what_it_computes():
    from transformers.models.glm import modeling_glm
    from transformers.models.llama import modeling_llama

    assert rotates_halves(modeling_llama.apply_rotary_pos_emb)
    assert not rotates_halves(modeling_glm.apply_rotary_pos_emb)


def test_what_transformers_keeps_in_float32_stays_so(tmp_path):
    folder = make("deepseek_v3", tmp_path)
    with LLM(str(folder), **EXACT | {"dtype": "bfloat16"}, num_kvcache_blocks=40) as llm:
        dtypes = {name: param.dtype for name, param in llm.model_runner.model.named_parameters()}
    [kept] = [dtype for name, dtype in dtypes.items() if name.endswith("e_score_correction_bias")]
    assert kept == torch.float32 and dtypes["model.embed_tokens.weight"] == torch.bfloat16


def test_what_other_threads_make_meanwhile_has_memory():
    with without_memory(), ThreadPoolExecutor(1) as thread:
        other = thread.submit(torch.nn.Linear, 2, 2).result()
        assert torch.nn.Linear(2, 2).weight.is_meta and not other.weight.is_meta
    assert not torch.nn.Linear(2, 2).weight.is_meta


MASKS = {
    **dict.fromkeys(["gpt2", "gptj"], ["h.0.attn.bias", "h.0.attn.masked_bias"]),
    "codegen": ["h.0.attn.causal_mask"],
    "gpt_neo": ["h.0.attn.attention.bias", "h.0.attn.attention.masked_bias"],
    "gpt_neox": [
        f"gpt_neox.layers.1.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq")
    ],
}


@pytest.mark.parametrize("kind", MASKS)
def test_masks_that_old_files_hold_are_left_out(tmp_path, kind):
    folder = make(kind, tmp_path)
    prefix = "transformer."  # which GPT-2's files are published without
    stored = load_file(folder / "model.safetensors")
    stored = {name.removeprefix(prefix): value for name, value in stored.items()}
    stored |= {name: torch.ones(1, 1, 4, 4, dtype=torch.bool) for name in MASKS[kind]}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    assert_answers_as_transformers(folder)


def slopes_of(folder) -> torch.Tensor:
    with LLM(str(folder), **EXACT, num_kvcache_blocks=40) as llm:
        slopes = {id(each.variant.slopes): each.variant.slopes for each in llm.model_runner.model.attention}
    [found] = slopes.values()
    return found.double()


def powers(exponents) -> torch.Tensor:
    return 2.0 ** -torch.tensor(exponents, dtype=torch.float64)


@pytest.mark.parametrize("heads, exponents", [(4, [2, 4, 6, 8]), (6, [2, 4, 6, 8, 1, 3]), (16, None)])
def test_slopes_are_those_of_the_next_power_of_two_and_of_every_second_of_the_one_behind(
    tmp_path, heads, exponents
):
    expected = powers(exponents or [i / 2 for i in range(1, 17)])
    sizes = dict(num_attention_heads=heads, hidden_size=96)
    found = slopes_of(make("bloom", tmp_path / "bloom", **sizes))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    found = slopes_of(make("falcon", tmp_path / "falcon", alibi=True, multi_query=False, **sizes))
    scaled = expected.bfloat16().double() / (96 / heads) ** 0.5  # rounded by transformers, too
    torch.testing.assert_close(found, scaled, rtol=1e-6, atol=0)


@pytest.mark.parametrize("most, heads, exponents", [(8, 4, [2, 4, 6, 8]), (16, 6, [4, 8, 12, 16, 2, 6])])
def test_slopes_of_mpt_end_with_what_its_file_says(tmp_path, monkeypatch, most, heads, exponents):
    config = {"attn_config": {"alibi_bias_max": most}}
    folder = make("mpt", tmp_path, num_attention_heads=heads, hidden_size=96, **config)
    torch.testing.assert_close(slopes_of(folder), powers(exponents), rtol=1e-6, atol=0)
    # Which transformers takes no notice of.
    monkeypatch.setattr(modeling_mpt.build_mpt_alibi_tensor, "__defaults__", (most, None))
    theirs = modeling_mpt.MptModel.build_mpt_alibi_tensor
    monkeypatch.setattr(theirs, "__defaults__", (most, None))
    assert_answers_as_transformers(folder)


@pytest.mark.parametrize("settings", [{}, {"seq_length": 64}])
def test_files_of_bloom_need_neither_say_the_context_nor_have_a_prefix(tmp_path, settings):
    folder = make("bloom", tmp_path, apply_residual_connection_post_layernorm=True, **settings)
    stored = load_file(folder / "model.safetensors")
    stored = {name.removeprefix("transformer."): value for name, value in stored.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    assert_answers_as_transformers(folder)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=40) as llm:
        assert llm.config.hf_config.context_limit == settings.get("seq_length", 2048)


@pytest.mark.parametrize("kind", ["bloom", "mpt"])
def test_prefixes_that_are_read_once_are_shifted_by_the_distance_of_each_query(tmp_path, monkeypatch, kind):
    fewest = dict(MIN_SHARED_TOKENS=8, MIN_PREFIX_SAVED=8, MIN_SAVED_TOKENS=64, MIN_ITEM_TOKENS=32)
    for name, value in (fewest | {"ITEM_STEP": 16}).items():
        monkeypatch.setattr(planner, name, value)
    folder = make(kind, tmp_path)
    prompts = [[*range(64), *range(i, 3 * i)] for i in range(1, 9)]
    with LLM(str(folder), **EXACT, num_kvcache_blocks=80) as llm:
        results = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert llm.stats()["num_grouped_tokens"] > 1000
    theirs = load_reference(folder)
    for prompt, result in zip(prompts, results, strict=True):
        assert_greedy(theirs, prompt, result["token_ids"])


def rope(kind: str, **settings) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **settings}}


def test_angles_that_depend_on_the_length_limit_the_context(tmp_path):
    factors = dict(short_factor=[1.5] * 8, long_factor=[9.0] * 8)
    folder = make("phi3", tmp_path, **rope("longrope", **factors), original_max_position_embeddings=48)
    assert_answers_as_transformers(folder)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=40) as llm:
        assert llm.config.max_model_len == 48


def test_angles_that_grow_behind_the_context_are_those_within_it(tmp_path):
    assert_answers_as_transformers(make("glm", tmp_path, **rope("dynamic", factor=2.0)))


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("mamba", {"architectures": ["MambaForCausalLM"]}, "'mamba' is not supported: it keeps a state of"),
        ("bert", {"architectures": ["BertLMHeadModel"]}, "'bert' is not supported: it is an encoder, or"),
        (
            "doge",
            {"architectures": ["DogeForCausalLM"]},
            "'doge' is not supported: no test shows it to be right",
        ),
        ("olmo", {"architectures": ["OlmoModel"]}, "architecture 'OlmoModel'"),
        ("olmo", {"architectures": 7}, "architecture 7"),
        ("olmo", {"architectures": ["OlmoForSequenceClassification", "Olmo"]}, "architecture 'OlmoFor"),
        ("llama", {"architectures": ["LlamaModel"]}, "architecture 'LlamaModel'"),
        ("no such type", {"architectures": []}, "architecture None"),
        ("olmo", {"hidden_size": "64"}, "cannot read the configuration"),
        ("olmo", {"num_attention_heads": 0}, "num_attention_heads"),
        ("no such type", {}, "is not known"),
        (["olmo"], {}, "is not known"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(tmp_path, kind, changes, message):
    folder = make("olmo", tmp_path)
    edit_json(folder / "config.json", model_type=kind, **changes)
    with pytest.raises(ValueError, match=message):
        LLM(str(folder), **EXACT)


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("bloom", {"slow_but_exact": True}, "slow_but_exact=True is not supported for model type 'bloom'"),
        ("mpt", {"no_bias": False}, "no_bias must be True for model type 'mpt', got False"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi must be True for model type 'mpt', got False"),
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type must be 'multihead_atten"),
        ("mpt", {"attn_config": {"attn_type": "grouped_query_attention"}}, "cannot read .*grouped_query_att"),
        ("mpt", {"max_seq_len": 0}, "max_seq_len must be"),
        (
            "codegen",
            {"auto_map": {"AutoModelForCausalLM": "m.M"}},
            "for model type 'codegen': CodeGen2's own",
        ),
        (
            "granitemoehybrid",
            {"layer_types": ["mamba", "attention"]},
            "layer_types .'linear_attention'. are not supported, only .'full_attention', 'sliding_att",
        ),
    ],
)
def test_a_verified_type_is_refused_where_its_file_asks_for_what_is_not_computed(
    tmp_path, kind, changes, message
):
    folder = make(kind, tmp_path)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        LLM(str(folder), **EXACT)


def test_what_is_refused_for_a_reason_is_known_and_not_verified():
    refused = [kind for kinds in REFUSED.values() for kind in kinds]
    assert len(refused) == len({*refused} - {*VERIFIED}) and {*refused} <= {
        *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    }


def test_an_old_transformers_is_refused(tmp_path, monkeypatch):
    folder = make("olmo", tmp_path)
    monkeypatch.setattr("transformers.__version__", "4.57.1")
    with pytest.raises(ValueError, match="needs transformers 5 or newer, this is 4.57.1"):
        LLM(str(folder), **EXACT)


def test_an_architecture_that_has_a_class_can_be_built_by_transformers_too(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3")
    for model_impl, name in [("auto", "Qwen3"), ("native", "Qwen3"), ("transformers", "Transformers")]:
        with LLM(str(folder), **EXACT, num_kvcache_blocks=40, model_impl=model_impl) as llm:
            assert type(llm.model_runner.model).__name__ == f"{name}ForCausalLM"


def test_only_architectures_that_have_a_class_are_native(tmp_path):
    with pytest.raises(ValueError, match="model_impl='native' has no class for .*Olmo.*only for Llama"):
        LLM(str(make("olmo", tmp_path)), **EXACT, model_impl="native")


def test_transformers_reads_the_shapes_that_benchmarks_name():
    checkpoints = (open_checkpoint("qwen3-8b", "dummy", model_impl=impl) for impl in ("auto", "transformers"))
    ours, theirs = (checkpoint.hf_config() for checkpoint in checkpoints)
    names = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size"
    for name in [*names.split(), "context_limit", "dtype", "tie_word_embeddings"]:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert transformers_config(theirs.raw).rope_parameters["rope_theta"] == 1e6


@pytest.mark.parametrize("kind", ["phi", "deepseek_v2", "codegen"])
def test_ranks_have_parts_of_what_transformers_builds(tmp_path, kind):
    assert_answers_as_transformers(make(kind, tmp_path), tensor_parallel_size=2)


@pytest.mark.parametrize(
    "kind, message",
    [
        ("stablelm", "StableLmModel has no plan to split it"),
        ("opt", "OPTModel has no plan to split it"),
        ("bloom", "BloomModel has no plan to split it"),
        ("mpt", "MptModel has no plan to split it"),
        ("falcon", "FalconModel has no plan to split it"),
        ("granite_swa", "tensor_parallel_size must be 1: layers.0.self_attn"),
        ("phi3", "Phi3Model has no plan to split it"),
        ("gemma3n_text", "tensor_parallel_size must be 1: layers.0.mlp cannot be split"),
    ],
)
def test_what_ranks_cannot_have_parts_of_is_refused(tmp_path, kind, message):
    with pytest.raises(ValueError, match=message):
        LLM(str(make(kind, tmp_path)), **EXACT, tensor_parallel_size=2)
