"""GLM-4.5 and Qwen2-MoE: experts beside an MLP for all tokens, and heads that are rotated in part."""

import json

import pytest
import torch
from exact_schedules import compare
from forked_ranks import forked_ranks  # noqa: F401
from published_configs import NATIVE, make_published
from quantised_checkpoints import PACKERS, quantise
from safetensors.torch import load_file, save_file
from transformers_checkpoints import assert_answers_as_transformers, make

from nanovllm import LLM
from nanovllm.extensions.checkpoints.support import describe
from tiny_checkpoints import EXACT, edit_json, one_thread, read_config  # noqa: F401

KINDS = "glm4_moe", "qwen2_moe"
OPTIONS = EXACT | dict(num_kvcache_blocks=40)
# Rows and inputs of two blocks of 128 each, the second of which is cut off, also where two ranks share them.
WIDE = dict(hidden_size=192, head_dim=64, intermediate_size=160, moe_intermediate_size=160)
WINDOWLESS = dict(use_sliding_window=False, layer_types=None)


def make_native(kind, folder, **changes):
    changes = (WINDOWLESS if kind == "qwen2_moe" else dict(use_qk_norm=True, attention_bias=True)) | changes
    return make(kind, folder, **changes)


def assert_native(folder, reference=None, **options):
    assert_answers_as_transformers(folder, reference, model_impl="native", **options)


@pytest.mark.parametrize("name", NATIVE)
def test_greedy_tokens_are_those_of_transformers_with_configurations_as_published(tmp_path, name):
    folder = make_published(name, tmp_path)
    assert_native(folder)
    assert describe(str(folder))[1].endswith("of this project")


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_the_same_with_the_defaults_of_a_class(tmp_path, kind):
    folder = make(kind, tmp_path, has_own_defaults=True)
    assert_native(folder)
    config = json.loads((folder / "config.json").read_text())
    sizes = """
        architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_experts
        num_attention_heads num_key_value_heads max_position_embeddings num_experts_per_tok n_routed_experts
        moe_intermediate_size shared_expert_intermediate_size
    """
    short = {name: config[name] for name in sizes.split() if name in config}
    (folder / "config.json").write_text(json.dumps(short | {"rope_theta": 1e4}))
    assert_native(folder)


YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=128)


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("glm4_moe", dict(n_group=3, topk_group=2, routed_scaling_factor=2.5)),
        ("glm4_moe", dict(n_group=6, topk_group=1, norm_topk_prob=False, n_shared_experts=2)),
        ("glm4_moe", dict(first_k_dense_replace=0, num_hidden_layers=3, tie_word_embeddings=True)),
        ("glm4_moe", dict(partial_rotary_factor=0.25, head_dim=24)),
        ("glm4_moe", dict(partial_rotary_factor=1.0, head_dim=32)),
        ("glm4_moe", dict(rope_parameters=YARN | {}, partial_rotary_factor=0.5)),
        ("qwen2_moe", dict(norm_topk_prob=True, decoder_sparse_step=2)),
        ("qwen2_moe", dict(mlp_only_layers=[0], shared_expert_intermediate_size=40)),
        ("qwen2_moe", dict(use_sliding_window=True, sliding_window=8, num_hidden_layers=4)),
        ("qwen2_moe", dict(rope_parameters=YARN | {}, num_experts_per_tok=11)),
    ],
    ids=str,
)
def test_greedy_tokens_are_the_same_with_other_settings(tmp_path, kind, changes):
    assert_native(make_native(kind, tmp_path, **changes))


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_answer_as_transformers_does(tmp_path, kind):
    assert_native(make_native(kind, tmp_path), tensor_parallel_size=2)


@pytest.mark.parametrize("size", [24, 25])
def test_ranks_must_divide_the_width_of_the_mlp_for_all_tokens(tmp_path, size):
    folder = make_native("qwen2_moe", tmp_path, shared_expert_intermediate_size=size)
    if size == 25:
        with pytest.raises(ValueError, match="must divide shared_expert_intermediate_size, which is 25"):
            LLM(str(folder), **OPTIONS, tensor_parallel_size=2)
    else:
        LLM(str(folder), **OPTIONS, tensor_parallel_size=2).exit()


@pytest.mark.parametrize(
    "kind, name, num_ranks",
    [
        ("glm4_moe", "float channel", 2),
        ("glm4_moe", "fp8 block", 1),
        ("glm4_moe", "nvfp4", 1),
        ("glm4_moe", "awq", 2),
        ("glm4_moe", "gptq", 1),
        ("glm4_moe", "pack 4, asymmetric", 2),
        ("glm4_moe", "nf4, nested", 1),
        ("glm4_moe", "int8 of bitsandbytes", 1),
        ("qwen2_moe", "gptq", 2),
        ("qwen2_moe", "awq", 1),
        ("qwen2_moe", "fp8 tensor", 1),
        ("qwen2_moe", "fp8 block", 2),
    ],
)
def test_answers_are_those_of_what_the_packed_weights_mean(tmp_path, kind, name, num_ranks):
    sizes = WIDE | ({"shared_expert_intermediate_size": 320} if kind == "qwen2_moe" else {})
    if "nf4" in name or num_ranks == 2:
        sizes |= dict(hidden_size=256, moe_intermediate_size=128, intermediate_size=256)
    floats, reference = make_native(kind, tmp_path / "floats", **sizes), tmp_path / "reference"
    folder = quantise(floats, tmp_path / "packed", PACKERS[name], reference)
    assert_native(folder, reference, tensor_parallel_size=num_ranks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_weights_may_be_quantised_here_but_not_what_chooses_and_gates(tmp_path, kind, quantization):
    folder = make_native(kind, tmp_path)
    scores = []
    for option in (None, quantization):
        with LLM(str(folder), **OPTIONS, quantization=option) as llm:
            scores += llm.score([[*range(40)]], use_tqdm=False)
            mixture = llm.model_runner.model.model.layers[1].mlp
    one, other = (score["logprob"] for score in scores)
    assert one != other == pytest.approx(one, rel=0.05)
    shared = mixture.shared_experts or mixture.shared_expert
    kept = torch.uint8 if quantization == "int4" else torch.float8_e4m3fn
    for layer in (shared.gate_up_proj, shared.down_proj, mixture.experts.down_proj):
        assert layer.matrix.weight.dtype == kept
    assert mixture.gate.matrix.weight.dtype == torch.float32


def test_an_adapter_changes_rows_before_they_change_places(tmp_path):
    folder, adapter, merged = (
        make_native("glm4_moe", tmp_path / "plain"),
        tmp_path / "adapter",
        tmp_path / "merged",
    )
    make_native("glm4_moe", merged)
    tensors, factors = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight"))]:
        rows, columns = tensors[name].shape
        a, b = torch.randn(2, columns) / 8, torch.randn(rows, 2) / 8
        module = f"base_model.model.{name.removesuffix('.weight')}"
        factors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        tensors[name] = tensors[name] + b @ a
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    adapter.mkdir()
    save_file(factors, adapter / "adapter_model.safetensors")
    edit_json(adapter / "adapter_config.json", peft_type="LORA", r=2, lora_alpha=2)
    assert_native(folder, merged, lora=str(adapter))


def test_scales_of_a_part_of_a_head_are_refused(tmp_path):
    """Rows of such a block would have to change places with rows of another."""
    floats = make_native("glm4_moe", tmp_path / "floats", head_dim=48, hidden_size=192)
    folder = quantise(floats, tmp_path / "packed", PACKERS["fp8 block"])
    message = "weights with a scale for 32 rows of a head cannot be rotated in part; model_impl='trans"
    with pytest.raises(ValueError, match=message):
        LLM(str(folder), **OPTIONS)


def test_the_layer_that_predicts_one_more_token_is_left_out(tmp_path):
    folder = make_native("glm4_moe", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    further = {"eh_proj.weight": torch.ones(2, 4), "self_attn.q_proj.weight": torch.ones(2, 2)}
    added = {f"model.layers.2.{name}": tensor for name, tensor in further.items()}
    save_file(tensors | added, folder / "model.safetensors", metadata={"format": "pt"})
    assert_native(folder)
    added = {"model.layers.3.self_attn.q_proj.weight": torch.ones(2, 2)}
    save_file(tensors | added, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="tensor model.layers.3.* has no place in Glm4MoeForCausalLM"):
        LLM(str(folder), **OPTIONS)


def test_sigmoids_are_of_logits_in_float32(tmp_path):
    folder = make_native("glm4_moe", tmp_path)
    with LLM(str(folder), **OPTIONS | {"dtype": "bfloat16"}) as llm:
        gate = llm.model_runner.model.model.layers[1].mlp.gate
        assert gate.matrix.weight.dtype == gate.e_score_correction_bias.dtype == torch.float32
        assert len(llm.generate([[1, 2, 3]], use_tqdm=False)[0]["token_ids"]) > 0


@pytest.mark.parametrize(
    "kind, field, value, message",
    [
        ("glm4_moe", "n_group", 5, "n_group must divide num_experts=12, got 5"),
        ("glm4_moe", "n_group", 0, "n_group must be an integer from 1 to 12, got 0"),
        ("glm4_moe", "topk_group", 2, "topk_group must be an integer from 1 to 1, got 2"),
        ("glm4_moe", "n_group", 12, "num_experts_per_tok must be an integer from 1 to 1, got 2"),
        ("glm4_moe", "routed_scaling_factor", 0, "routed_scaling_factor must be a number from 1e-06"),
        ("glm4_moe", "n_shared_experts", -1, "n_shared_experts must be an integer from 0"),
        ("glm4_moe", "first_k_dense_replace", True, "first_k_dense_replace must be an integer from 0"),
        ("glm4_moe", "use_qk_norm", 1, "use_qk_norm must be True or False, got 1"),
        ("glm4_moe", "partial_rotary_factor", 2, "partial_rotary_factor must be a number from 0 to 1, got 2"),
        ("glm4_moe", "partial_rotary_factor", 0.2, "partial_rotary_factor must leave an even number of rows"),
        ("glm4_moe", "partial_rotary_factor", 0, "partial_rotary_factor must leave an even number of rows"),
        ("qwen2_moe", "qkv_bias", False, "qkv_bias = False is not supported, only True"),
        ("qwen2_moe", "partial_rotary_factor", 0.5, "partial_rotary_factor = 0.5 is not supported, only 1.0"),
        (
            "qwen2_moe",
            "shared_expert_intermediate_size",
            -1,
            "shared_expert_intermediate_size must be an int",
        ),
    ],
)
def test_settings_that_are_not_possible_are_refused_by_name(tmp_path, kind, field, value, message):
    folder = make_native(kind, tmp_path)
    edit_json(folder / "config.json", rope_parameters=None, rope_theta=1e4, **{field: value})
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        LLM(str(folder), **OPTIONS)


def test_windows_of_qwen2_moe_need_kinds_of_layers(tmp_path):
    folder = make_native("qwen2_moe", tmp_path)
    edit_json(folder / "config.json", use_sliding_window=True, sliding_window=8, layer_types=None)
    with pytest.raises(ValueError, match="use_sliding_window needs layer_types"):
        LLM(str(folder), **OPTIONS)


def test_glm_is_refused_in_exact_mode_by_its_name(tmp_path):
    with pytest.raises(ValueError, match="exact=True needs the architecture to be one of .*'Glm4MoeForCausa"):
        LLM(str(make_native("glm4_moe", tmp_path)), **OPTIONS, exact=True)


@pytest.mark.slow
@pytest.mark.usefixtures("no_forecast")
@pytest.mark.parametrize("exact", [True, False])
def test_qwen2_moe_has_the_logits_of_a_sequence_alone_in_exact_mode(tmp_path, exact):
    folder = make_native("qwen2_moe", tmp_path, num_attention_heads=4)
    counts, different = compare(str(folder), 2, 1, 12, device="cpu", dtype="float32", exact=exact)
    assert counts["completions"] > 20 and bool(different) is not exact
