"""GGUF files of architectures that transformers builds: greedy tokens as by transformers itself."""

import math
from dataclasses import replace

import pytest
import torch
import transformers
from forked_ranks import forked_ranks  # noqa: F401
from gguf_files import placed, write_gguf
from gguf_packer import decode, encode
from kernel_checks import needs_cuda
from open_checkpoints import open_checkpoint
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers_checkpoints import assert_answers_as_transformers, make

from nanovllm import LLM
from nanovllm.assembly import build_model
from nanovllm.extensions.checkpoints.names import MadeTensor
from nanovllm.extensions.experts.moe import Experts
from nanovllm.extensions.quantised.gguf import PackedCodes
from nanovllm.extensions.quantised.kernels.quantised_weight import QuantisedWeight, dequantise
from nanovllm.extensions.transformers.config import VERIFIED
from nanovllm.layers.linear import LinearBase
from nanovllm.utils.loader import load_model
from tiny_checkpoints import EXACT, load_reference, make_checkpoint, one_thread  # noqa: F401

IS_OLD = transformers.__version__.startswith("4.")
PARTS = "gate", "up", "down"
LONG = dict(long_factor=[4.0, 3.0, 2.0, 1.5], short_factor=[1.0, 1.1, 1.2, 1.3])
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128} | LONG
PLAIN = {"rope_type": "default", "rope_theta": 2e4}
YARN = {"rope_type": "yarn", "rope_theta": 2e4, "factor": 8.0, "original_max_position_embeddings": 64}
WIDTHS = dict(moe_intermediate_size=32, shared_expert_intermediate_size=32)
# By the names of files, the model type and what its configuration has here.
CASES = {
    "gemma2": (
        "gemma2",
        dict(head_dim=16, query_pre_attn_scalar=16, attn_logit_softcapping=5.0, tie_word_embeddings=True),
    ),
    "phi3": ("phi3", dict(sliding_window=8)),
    "phi3, all of which attends to all": ("phi3", dict(sliding_window=None)),
    "phi3, longer": (
        "phi3",
        dict(
            rope_parameters=LONGROPE | {"partial_rotary_factor": 0.5},
            original_max_position_embeddings=128,
        ),
    ),
    "granite": (
        "granite",
        dict(attention_multiplier=0.3, embedding_multiplier=2.0, residual_multiplier=0.5, logits_scaling=1.5),
    ),
    "granite with biases": ("granite", dict(attention_bias=True, mlp_bias=True)),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "olmo3, longer": ("olmo3", dict(rope_parameters={"full_attention": YARN, "sliding_attention": PLAIN})),
    "smollm3": ("smollm3", dict(num_hidden_layers=4, layer_types=None, use_sliding_window=False)),
    "glm4": ("glm4", dict(head_dim=16)),
    "command-r": ("cohere", dict(logit_scale=0.5, tie_word_embeddings=True)),
    "command-r with norms": ("cohere", dict(use_qk_norm=True, tie_word_embeddings=True)),
    "cohere2": (
        "cohere2",
        dict(
            num_hidden_layers=4,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
            tie_word_embeddings=True,
        ),
    ),
    "starcoder2": ("starcoder2", {}),
    "starcoder2, tied": ("starcoder2", dict(tie_word_embeddings=True, sliding_window=None)),
    "stablelm": ("stablelm", dict(use_qkv_bias=True)),
    "mixtral": ("mixtral", dict(sliding_window=None)),
    "qwen2moe": ("qwen2_moe", dict(use_sliding_window=False, layer_types=None, **WIDTHS)),
    "olmoe": ("olmoe", {}),
    "glm4moe": ("glm4_moe", WIDTHS | dict(attention_bias=True, use_qk_norm=True, head_dim=16)),
    "deepseek2": ("deepseek_v2", WIDTHS | dict(n_group=1, topk_group=1)),
    "deepseek2, experts in groups": ("deepseek_v2", WIDTHS | dict(topk_method="group_limited_greedy")),
    "deepseek2, longer": (
        "deepseek_v2",
        WIDTHS | dict(n_group=1, topk_group=1, rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=0.7)),
    ),
    "deepseek2 with sigmoids": ("deepseek_v3", WIDTHS | dict(q_lora_rank=None)),
    "stablelm, norms and branches": ("stablelm", dict(use_parallel_residual=True, qk_layernorm=True)),
}


def make_file(folder, case, quantisation="F32", **changes):
    """A file, and in its folder the same model for transformers."""
    kind, settings = CASES[case]
    if kind not in CONFIG_MAPPING or IS_OLD:
        pytest.skip("this version of transformers does not know it, or cannot build it for us")
    assert kind in VERIFIED
    make(kind, folder, **settings | changes)
    if not case.startswith("deepseek2"):
        through(folder, quantisation, lambda name: "norm" not in name)
        return write_gguf(folder, quantisation)
    # Of keys' matrices, of which the file has the columns as rows, others would be left.
    through(folder, quantisation, lambda name: ".experts." in name)
    return write_gguf(folder, {"": "F32"} | {f"ffn_{part}_exps": quantisation for part in PARTS})


def through(folder, quantisation, is_quantised):
    """Replace matrices with what is left of them after a trip through a quantisation."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() > 1 and is_quantised(name):
            rows = tensor.transpose(-1, -2).contiguous() if tensor.dim() > 2 else tensor
            rows = decode(encode(rows, quantisation), quantisation)
            tensors[name] = rows.transpose(-1, -2).contiguous() if tensor.dim() > 2 else rows
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "case, quantisation",
    [
        *((case, "Q8_0") for case in CASES),
        *((case, "F32") for case in ("phi3, longer", "mixtral", "deepseek2")),
    ],
)
def test_greedy_tokens_are_those_of_transformers(tmp_path, case, quantisation):
    file = make_file(tmp_path, case, quantisation)
    assert_answers_as_transformers(file, tmp_path, model_impl="auto")


@pytest.mark.parametrize("case", ["gemma2", "starcoder2", "stablelm"])
def test_transformers_itself_reads_the_same_weights(tmp_path, case):
    """As far as it reads such files."""
    make_file(tmp_path, case)
    write_gguf(tmp_path, ARCH__vocab_size=320, tokenizer__ggml__tokens=["a"] * 320)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    expected = load_reference(tmp_path).state_dict()
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


@pytest.mark.skipif(IS_OLD, reason="needs transformers 5")
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_transformers_can_build_what_has_a_class_here(tmp_path, architecture):
    own = {"query_pre_attn_scalar": 16} if architecture == "gemma3" else {}
    make_checkpoint(tmp_path, architecture, **own)
    assert_answers_as_transformers(write_gguf(tmp_path), tmp_path)


@pytest.mark.parametrize("window", [None, 8])
def test_a_file_of_mistral_is_one_of_llama_and_may_have_a_window(tmp_path, window):
    make_checkpoint(tmp_path, "mistral", sliding_window=window)
    file = write_gguf(tmp_path)
    assert open_checkpoint(file).architecture == "llama"
    assert_answers_as_transformers(file, tmp_path, model_impl="auto")


@pytest.mark.parametrize("case", ["phi3", "glm4", "starcoder2", "glm4moe"])
def test_matrices_stay_packed(tmp_path, case):
    sizes = dict(hidden_size=128, intermediate_size=128, vocab_size=16, head_dim=32)
    if case == "glm4moe":  # whose experts are looked at below
        sizes["first_k_dense_replace"] = 2
    file = make_file(tmp_path, case, "Q8_0", **sizes)
    theirs, prompt = load_reference(tmp_path), [*range(16)] * 2
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    with LLM(str(file), **EXACT | {"dtype": "bfloat16"}, num_kvcache_blocks=40) as llm:
        linears = [each for each in llm.model_runner.model.modules() if isinstance(each, LinearBase)]
        assert len(linears) == 2 * {"phi3": 4, "glm4moe": 4}.get(case, 6)
        assert {type(run) for linear in linears for run in linear.matrix.runs} == {PackedCodes}
        [result] = llm.score([prompt], use_tqdm=False)
    expected = logits.gather(1, torch.tensor(prompt)[1:, None]).sum().item()
    assert result["logprob"] == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("case", ["mixtral", "qwen2moe", "glm4moe", "deepseek2 with sigmoids"])
def test_experts_stay_packed(tmp_path, case):
    sizes = dict(hidden_size=128, intermediate_size=128, vocab_size=16, moe_intermediate_size=128)
    if case == "mixtral":
        del sizes["moe_intermediate_size"]
    file = make_file(tmp_path, case, "Q8_0", **sizes, num_experts_per_tok=12)  # all, or the smallest change
    theirs, prompt = load_reference(tmp_path), [*range(16)] * 2  # of a score would choose others
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    with LLM(str(file), **EXACT | {"dtype": "bfloat16"}, num_kvcache_blocks=40) as llm:
        experts = [each for each in llm.model_runner.model.modules() if isinstance(each, Experts)]
        assert len(experts) == (2 if case in ("mixtral", "qwen2moe") else 1)
        assert all(type(each.weights.gate_up) is type(each.weights.down) is PackedCodes for each in experts)
        [result] = llm.score([prompt], use_tqdm=False)
    expected = logits.gather(1, torch.tensor(prompt)[1:, None]).sum().item()
    assert result["logprob"] == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("case", ["phi3", "glm4", "qwen2moe", "glm4moe", "deepseek2"])
def test_two_ranks_answer_as_transformers_does(tmp_path, case):
    file = make_file(tmp_path, case, "Q8_0")
    if case == "phi3":
        with pytest.raises(ValueError, match="tensor_parallel_size must be 1"):
            LLM(str(file), **EXACT, tensor_parallel_size=2)
    else:
        assert_answers_as_transformers(file, tmp_path, model_impl="auto", tensor_parallel_size=2)


# gpt-oss, whose experts have a format of their own


def make_gpt_oss(folder, quantisation, seed=0, **changes):
    make_checkpoint(folder, "gpt_oss", seed, tokenizer=False, **changes)
    through(folder, quantisation, lambda name: ".experts." in name and "bias" not in name)
    return write_gguf(folder, {"": "F32"} | {f"ffn_{part}_exps": quantisation for part in PARTS})


@pytest.mark.parametrize("quantisation", ["F32", "Q8_0", "MXFP4"])
def test_gpt_oss_answers_as_transformers_does(tmp_path, quantisation):
    file = make_gpt_oss(tmp_path, quantisation)
    assert_answers_as_transformers(file, tmp_path, model_impl="auto")


def test_mxfp4_of_experts_is_that_of_the_folder(tmp_path):
    file = make_gpt_oss(tmp_path, "MXFP4")
    checkpoint = open_checkpoint(file)
    model = build_model(checkpoint.hf_config())
    load_model(model, checkpoint)
    tensors = load_file(tmp_path / "model.safetensors")
    for number, layer in enumerate(model.model.layers):
        weights = layer.mlp.experts.weights
        prefix = f"model.layers.{number}.mlp.experts"
        gates_and_ups, downs = tensors[f"{prefix}.gate_up_proj"], tensors[f"{prefix}.down_proj"]
        expected = torch.cat((gates_and_ups[..., ::2], gates_and_ups[..., 1::2]), -1).transpose(1, 2)
        for weight, matrix in (weights.gate_up, expected), (weights.down, downs.transpose(1, 2)):
            assert weight.codes.dtype == torch.uint8
            assert torch.equal(dequantise(weight, torch.float32), matrix.flatten(0, 1))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("case", ["MXFP4", "Q8_0", "qwen2moe"])
def test_experts_are_as_likely_to_go_on_on_a_gpu(tmp_path, case):
    sizes = dict(hidden_size=128, vocab_size=16)
    if case == "qwen2moe":
        sizes |= dict(intermediate_size=128, moe_intermediate_size=128, num_experts_per_tok=12)
        file = make_file(tmp_path, case, "Q8_0", **sizes)
    else:
        file = make_gpt_oss(tmp_path, case, intermediate_size=128, num_experts_per_tok=4, **sizes)
    prompt, reference = [*range(16)] * 2, load_reference(tmp_path).cuda()
    tokens = torch.tensor([prompt], device="cuda")
    with torch.no_grad():
        logprobs = reference(input_ids=tokens).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, tokens[:, 1:].T).sum().item()
    options = dict(device="cuda", dtype="bfloat16", kvcache_block_size=16, num_kvcache_blocks=40)
    with LLM(str(file), **options) as llm:
        experts = [each for each in llm.model_runner.model.modules() if isinstance(each, Experts)]
        assert experts and all(isinstance(each.weights.gate_up, QuantisedWeight) for each in experts)
        [result] = llm.score([prompt], use_tqdm=False)
    assert result["logprob"] == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("quantisation", ["Q8_0", "MXFP4"])
def test_two_ranks_of_gpt_oss_answer_as_one(tmp_path, quantisation):
    sizes = dict(intermediate_size=96, num_key_value_heads=4)  # 48 inputs a rank: a block and a half
    file = make_gpt_oss(tmp_path, quantisation, **sizes)
    assert_answers_as_transformers(file, tmp_path, model_impl="auto", tensor_parallel_size=2)


def test_other_experts_may_be_mxfp4_too(tmp_path):
    make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False)
    file = write_gguf(tmp_path, {"": "F32"} | {f"ffn_{part}_exps": "MXFP4" for part in PARTS})
    tensors = {tensor.name: tensor[:].contiguous() for tensor in placed(open_checkpoint(file))}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_answers_as_transformers(file, tmp_path, model_impl="auto")


def test_an_adapter_cannot_change_experts_in_mxfp4(tmp_path):
    def change(tensors, _model, _known):
        for each in tensors:
            is_changed = each.name.endswith("experts.3.up_proj.weight")
            yield MadeTensor(each.file, each.name, each[...] + 1) if is_changed else each

    checkpoint = open_checkpoint(make_gpt_oss(tmp_path, "MXFP4"))
    checkpoint.changes += (change,)
    model = build_model(checkpoint.hf_config())
    with pytest.raises(ValueError, match="experts.3.up_proj.weight: is MXFP4, which no adapter can change"):
        load_model(model, checkpoint)


# DeepSeek's attention, and blocks that predict more tokens


def test_keys_and_values_may_be_one_matrix_as_in_older_files(tmp_path):
    make_file(tmp_path, "deepseek2")
    file = write_gguf(tmp_path, is_newest=False)
    assert "blk.0.attn_kv_b.weight" in open_checkpoint(file).stored
    assert_answers_as_transformers(file, tmp_path, model_impl="auto")


@pytest.mark.parametrize("lacks_values", [False, True])
def test_keys_and_values_that_do_not_fit_are_an_error(tmp_path, lacks_values):
    checkpoint = open_checkpoint(make_file(tmp_path, "deepseek2"))
    values = checkpoint.stored.pop("blk.1.attn_v_b.weight")
    if not lacks_values:
        checkpoint.stored[values.name] = replace(values, shape=(values.shape[0], 8 * 16))
    with pytest.raises(ValueError, match="model.gguf: tensor blk.1.attn_k_b.weight does not fit"):
        load_model(build_model(checkpoint.hf_config()), checkpoint)


def test_blocks_that_predict_more_tokens_are_left_out(tmp_path):
    make_file(tmp_path, "glm4moe")
    more = [(f"blk.2.{name}.weight", torch.ones(3)) for name in ("attn_norm", "nextn.eh_proj")]
    keys = dict(ARCH__block_count=3, ARCH__nextn_predict_layers=1)
    file = write_gguf(tmp_path, extra_tensors=more, **keys)
    assert_answers_as_transformers(file, tmp_path, model_impl="auto")
    checkpoint = open_checkpoint(file)
    for count in (3, 4, -(2**31)):
        checkpoint.metadata["glm4moe.nextn_predict_layers"] = count
        with pytest.raises(ValueError, match="model.gguf: .*num_hidden_layers must be"):
            checkpoint.hf_config()


# What files may say and nobody reads


def changed(folder, case, removed=(), **metadata):
    checkpoint = open_checkpoint(make_file(folder, case))
    for key, value in metadata.items():
        checkpoint.metadata[f"{checkpoint.architecture}.{key.replace('__', '.')}"] = value
    for key in removed:
        del checkpoint.metadata[f"{checkpoint.architecture}.{key}"]
    return checkpoint


@pytest.mark.parametrize(
    "case, removed, message",
    [
        ("command-r", ["logit_scale"], "command-r.logit_scale must be one float, got None"),
        ("granite", ["attention.scale"], "granite.attention.scale must be one float, got None"),
        ("olmo3", ["attention.sliding_window_pattern"], "sliding_window_pattern must be one list, got None"),
        (
            "starcoder2",
            ["attention.layer_norm_epsilon"],
            "layer_norm_rms_epsilon must be one float, got None",
        ),
        ("phi3, longer", ["rope.scaling.original_context_length"], "context_length must be one int"),
    ],
)
def test_a_key_that_is_missing_is_named(tmp_path, case, removed, message):
    with pytest.raises(ValueError, match=f"model.gguf: .*{message}"):
        changed(tmp_path, case, removed).hf_config()


@pytest.mark.parametrize("case", ["granite", "smollm3", "command-r"])
def test_a_part_of_heads_is_rotated_only_in_some_architectures(tmp_path, case):
    with pytest.raises(ValueError, match="rope.dimension_count must be 16 like the keys' length"):
        changed(tmp_path, case, rope__dimension_count=8).hf_config()


@pytest.mark.parametrize("case", ["phi3", "glm4", "stablelm"])
@pytest.mark.parametrize("size", [-8, 0, 7, 32])
def test_no_file_rotates_a_part_of_heads_that_there_is_not(tmp_path, case, size):
    with pytest.raises(ValueError, match=f"model.gguf: rope.dimension_count must be an even .*got {size}"):
        changed(tmp_path, case, rope__dimension_count=size).hf_config()


@pytest.mark.parametrize("layers, divisor", [(45, 32), (46, 64 // 4)])
def test_gemma_divides_scores_by_the_size_of_a_head_but_in_the_largest_model(tmp_path, layers, divisor):
    lengths = dict(attention__key_length=32, attention__value_length=32, rope__dimension_count=32)
    checkpoint = changed(tmp_path, "gemma2", block_count=layers, **lengths)
    assert checkpoint.hf_config().raw["query_pre_attn_scalar"] == divisor


def test_factors_of_longer_contexts_have_to_be_as_many_as_frequencies(tmp_path):
    checkpoint = changed(tmp_path, "phi3, longer", rope__dimension_count=16)
    with pytest.raises(ValueError, match="model.gguf: transformers cannot read .*factor"):
        checkpoint.hf_config()
    checkpoint.metadata["phi3.rope.dimension_count"] = 8
    assert checkpoint.hf_config().context_limit == 128
    del checkpoint.stored["rope_factors_short.weight"]
    with pytest.raises(ValueError, match="model.gguf: it has no tensor rope_factors_short.weight"):
        checkpoint.hf_config()


@pytest.mark.parametrize("factor, is_allowed", [(1.0, True), (0.1 * math.log(8) + 1, True), (1.1, False)])
def test_the_factor_of_yarn_may_be_said_in_numbers(tmp_path, factor, is_allowed):
    scaling = dict(type="yarn", factor=8.0, original_context_length=64, yarn_attn_factor=factor)
    checkpoint = changed(
        tmp_path, "olmo3", **{f"rope__scaling__{key}": each for key, each in scaling.items()}
    )
    if is_allowed:
        assert checkpoint.hf_config().raw["rope_scaling"]["factor"] == 8
    else:
        with pytest.raises(ValueError, match="yarn_attn_factor = 1.1 is not supported, only 1"):
            checkpoint.hf_config()


def test_experts_have_to_be_as_many_as_the_file_says(tmp_path):
    make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False)
    checkpoint = open_checkpoint(write_gguf(tmp_path))
    checkpoint.metadata["qwen3moe.expert_count"] = 7
    with pytest.raises(ValueError, match="model.gguf: tensor blk.0.ffn_.*_exps.weight holds 8, not 7"):
        load_model(build_model(checkpoint.hf_config()), checkpoint)


def test_a_tensor_without_a_place_is_named_as_in_the_file(tmp_path):
    make_file(tmp_path, "olmo2")
    checkpoint = open_checkpoint(write_gguf(tmp_path, extra_tensors=[("blk.0.other.weight", torch.ones(3))]))
    with pytest.raises(ValueError, match="tensor blk.0.other.weight has no place"):
        load_model(build_model(checkpoint.hf_config()), checkpoint)
