"""Experts of models that transformers builds, in the formats of weights that those of native models have."""

import pytest
import torch
from forked_ranks import forked_ranks  # noqa: F401
from quantised_checkpoints import PACKERS, quantise
from safetensors.torch import load_file, save_file
from transformers_checkpoints import PROMPTS, assert_answers_as_transformers, make, settings_of

from nanovllm import LLM
from nanovllm.extensions.experts.moe import StackedLinear
from tiny_checkpoints import EXACT, one_thread  # noqa: F401

# Rows and inputs of two blocks of 128 each, the second of which is cut off, also where two ranks share them.
WIDE = dict(intermediate_size=160, moe_intermediate_size=160, shared_expert_intermediate_size=160)
WIDE |= dict(hidden_size=192, q_lora_rank=32, kv_lora_rank=32)
OPTIONS = EXACT | dict(num_kvcache_blocks=40)


def make_wide(kind, folder):
    return make(kind, folder, **{name: value for name, value in WIDE.items() if name in settings_of(kind)})


@pytest.fixture
def mixtral(tmp_path):
    return make_wide("mixtral", tmp_path / "floats")


def edit(folder, change):
    """Change the tensors of a checkpoint of one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def formats(llm) -> set[torch.dtype]:
    modules = llm.model_runner.model.modules()
    return {module.matrix.weight.dtype for module in modules if isinstance(module, StackedLinear)}


@pytest.mark.parametrize(
    "kind, name, num_ranks",
    [
        ("mixtral", "awq", 1),
        ("mixtral", "gptq", 2),
        ("mixtral", "fp8 block", 1),
        ("mixtral", "pack 4", 1),
        ("glm4_moe", "float channel", 2),
        ("glm4_moe", "fp8 block", 1),
        ("glm4_moe", "nvfp4", 1),
        ("minimax_m2", "fp8 block", 2),
        ("deepseek_v3", "fp8 block", 2),
        ("deepseek_v3", "awq", 1),
        ("qwen2_moe", "gptq", 1),
        ("qwen2_moe", "fp8 tensor", 1),
        ("phimoe", "fp8 block, e8m0 scales", 1),
    ],
)
def test_answers_are_those_of_what_the_packed_weights_mean(tmp_path, kind, name, num_ranks):
    floats, reference = make_wide(kind, tmp_path / "floats"), tmp_path / "reference"
    folder = quantise(floats, tmp_path / "packed", PACKERS[name], reference)
    assert_answers_as_transformers(folder, reference, tensor_parallel_size=num_ranks)


@pytest.mark.parametrize("kind, num_ranks", [("minimax_m2", 2), ("granitemoe", 2), ("qwen2_moe", 2)])
def test_ranks_have_parts_of_experts_that_are_not_quantised(tmp_path, kind, num_ranks):
    assert_answers_as_transformers(make_wide(kind, tmp_path), tensor_parallel_size=num_ranks)


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
def test_experts_may_be_stored_in_one_tensor(tmp_path, mixtral, quantization):
    joined = make_wide("mixtral", tmp_path / "joined")

    def join(tensors):
        for layer in "model.layers.0.mlp", "model.layers.1.mlp":
            stored = layer.replace("mlp", "block_sparse_moe")
            w1, w2, w3 = (
                torch.stack([tensors.pop(f"{stored}.experts.{i}.{name}.weight") for i in range(12)])
                for name in ("w1", "w2", "w3")
            )
            tensors[f"{layer}.experts.gate_up_proj"] = torch.cat((w1, w3), dim=1)
            tensors[f"{layer}.experts.down_proj"] = w2

    scores = []
    for folder in mixtral, edit(joined, join):
        with LLM(str(folder), **OPTIONS, quantization=quantization) as llm:
            scores.append(llm.score(PROMPTS, use_tqdm=False))
            dtypes = {None: torch.float32, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
            assert formats(llm) == {dtypes[quantization]}
    assert scores[0] == scores[1]


def test_a_tensor_of_other_experts_is_refused(tmp_path):
    folder = make("granitemoe", tmp_path)
    name = "model.layers.1.block_sparse_moe.input_linear.weight"
    edit(folder, lambda tensors: tensors.update({name: tensors[name][:11].clone()}))
    with pytest.raises(
        ValueError, match=r"has no tensor model.layers.1.*experts.11.gate_proj.weight, the first of 2"
    ):
        LLM(str(folder), **OPTIONS)


NAME = "model.layers.1.block_sparse_moe.experts.7.w3"


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda tensors: tensors.pop(f"{NAME}.weight_scale_inv"),
            r"has no tensor model.layers.1.mlp.experts.7.up_proj.weight_scale_inv",
        ),
        (
            lambda tensors: tensors.update({f"{NAME}.weight": tensors[f"{NAME}.weight"][:, :64].clone()}),
            r"tensor model.layers.1.mlp.experts.7.up_proj.weight: shape \(160, 64\), expected \(160, 192\)",
        ),
        (
            lambda tensors: tensors.update({f"{NAME}.weight_scale_inv": torch.ones(1, 2)}),
            r"experts.7.up_proj.weight_scale_inv: shape \(1, 2\), expected \(2, 2\)",
        ),
        (
            lambda tensors: tensors.update({NAME.replace(".7.", ".12.") + ".weight": torch.ones(160, 192)}),
            r"tensor model.*experts.12.*weight has no place in TransformersForCausalLM",
        ),
    ],
)
def test_a_damaged_file_is_refused_by_the_name_of_the_tensor(tmp_path, mixtral, change, message):
    folder = quantise(mixtral, tmp_path / "packed", PACKERS["fp8 block"])
    with pytest.raises(ValueError, match=message):
        LLM(str(edit(folder, change)), **OPTIONS)


def test_experts_of_layers_that_predict_further_tokens_are_left_out(tmp_path):
    """DeepSeek's files have one behind the last, layer 61, which no forward pass needs."""
    floats, reference = make_wide("deepseek_v3", tmp_path / "floats"), tmp_path / "reference"
    folder = quantise(floats, tmp_path / "packed", PACKERS["fp8 block"], reference)
    further = "model.layers.61.mlp.experts.0.gate_proj"
    added = {f"{further}.weight": torch.ones(2, 2), f"{further}.weight_scale_inv": torch.ones(1, 1)}
    assert_answers_as_transformers(edit(folder, lambda tensors: tensors.update(added)), reference)


def test_inputs_in_an_order_of_their_own_are_refused(tmp_path, mixtral):
    folder = quantise(mixtral, tmp_path / "packed", PACKERS["gptq, ordered"])
    with pytest.raises(ValueError, match="experts with inputs in an order of their own are not supported"):
        LLM(str(folder), **OPTIONS)


def test_the_gate_of_a_shared_expert_is_not_quantised(tmp_path):
    options = OPTIONS | dict(quantization="int4", model_impl="transformers")
    with LLM(str(make("qwen2_moe", tmp_path)), **options) as llm:
        moe = llm.model_runner.model.get_submodule("model.layers.1.mlp")
        assert formats(llm) == {torch.uint8} == {moe.shared_expert.down_proj.matrix.weight.dtype}
        assert moe.shared_expert_gate.matrix.weight.dtype == torch.float32


@pytest.mark.parametrize("kind, changes", [("mixtral", {"hidden_act": "gelu"}), ("aria_text", {})])
def test_experts_of_another_kind_are_left_to_transformers(tmp_path, kind, changes):
    folder = make(kind, tmp_path, **changes)
    assert_answers_as_transformers(folder)
    with pytest.raises(
        ValueError, match="layers.0.mlp.experts.gate_up_proj cannot be quantised: only expert"
    ):
        LLM(str(folder), **OPTIONS, quantization="int4")
    with pytest.raises(
        ValueError, match="tensor_parallel_size must be 1: layers.0.mlp.experts cannot be spl"
    ):
        LLM(str(folder), **OPTIONS, tensor_parallel_size=2)
