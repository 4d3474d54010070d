"""gpt-oss through the whole engine: its checkpoint as published, against transformers with what it means."""

import json
from types import SimpleNamespace

import pytest
import torch
from forked_ranks import forked_ranks  # noqa: F401
from open_checkpoints import open_checkpoint
from quantised_checkpoints import mxfp4, quantise
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.assembly import build_model, read_config
from nanovllm.distributed.group import Group, use_group
from nanovllm.extensions.quantised import fp4
from nanovllm.extensions.quantised.kernels.quantised_weight import QuantisedWeight, dequantise, in_bricks
from nanovllm.utils.loader import load_model, pack_weights
from nanovllm.utils.torch_defaults import torch_defaults
from tiny_checkpoints import EXACT, assert_greedy, edit_json, load_reference, make_checkpoint, one_thread  # noqa: F401

PROMPTS = [[1, 2, 3], [*range(60)], [7] * 40, [*range(100, 230)]]  # the window is of 24 tokens
GREEDY = SamplingParams(0, 12, True)
SIZES = dict(num_hidden_layers=3, intermediate_size=96)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The packed checkpoint, and what it means."""
    floats, packed, reference = map(tmp_path_factory.mktemp, ("floats", "packed", "reference"))
    make_checkpoint(floats, "gpt_oss", **SIZES)
    return quantise(floats, packed, mxfp4(), reference), reference


def load(folder, load_format="auto", dtype=torch.float32, **options):
    checkpoint = open_checkpoint(folder, load_format, **options)
    with torch_defaults(dtype, torch.device("cpu")):
        model = build_model(checkpoint.hf_config())
        load_model(model, checkpoint)
    return model


@pytest.mark.parametrize("size", [1, 2])
def test_its_packed_checkpoint_answers_as_transformers_does_with_what_it_means(folders, size):
    """Two ranks cut groups of 32 inputs in the middle."""
    packed, reference = folders
    theirs = load_reference(reference)
    options = dict(max_num_batched_tokens=48, num_kvcache_blocks=22, tensor_parallel_size=size)
    with LLM(str(packed), **EXACT, **options) as llm:
        for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False), strict=True):
            assert_greedy(theirs, prompt, result["token_ids"])


def test_the_packed_matrices_mean_bit_for_bit_what_they_should_on_every_rank(folders):
    packed, reference = folders
    expected = load_file(reference / "model.safetensors")
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        with use_group(Group(rank, size)):
            experts = load(packed).model.layers[1].mlp.experts
        gate_up, down = (
            dequantise(each, torch.float32).unflatten(0, (4, -1)) for each in experts.weights[:2]
        )
        mine = slice(rank * 96 // size, (rank + 1) * 96 // size)
        whole = expected["model.layers.1.mlp.experts.gate_up_proj"].transpose(1, 2)
        assert torch.equal(gate_up, torch.cat([whole[:, half::2][:, mine] for half in (0, 1)], dim=1))
        whole = expected["model.layers.1.mlp.experts.down_proj"].transpose(1, 2)
        assert torch.equal(down, whole[:, :, mine])


def both(experts) -> tuple[QuantisedWeight, QuantisedWeight]:
    """Their two weights, as they are stored."""
    return experts.gate_up_proj.matrix.quantised, experts.down_proj.matrix.quantised


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("major", [8, 9, 10])
def test_on_a_hopper_gpu_experts_of_whole_bricks_are_packed_for_16_bits(monkeypatch, folders, major, dtype):
    monkeypatch.setattr(fp4, "gpu_properties", lambda device: SimpleNamespace(major=major))
    rows, bricks = load(folders[0], dtype=dtype), load(folders[0], dtype=dtype)
    pack_weights(bricks)
    for one, other in zip(rows.model.layers, bricks.model.layers, strict=True):
        for weight, packed in zip(both(one.mlp.experts), both(other.mlp.experts), strict=True):
            assert packed.is_in_bricks == (major == 9 and dtype == torch.bfloat16)
            expected = in_bricks(weight) if packed.is_in_bricks else weight
            assert torch.equal(packed.codes, expected.codes)
            assert torch.equal(packed.readable_scales, expected.readable_scales)


@pytest.mark.parametrize("size", [2, 4])
def test_experts_of_other_sizes_are_not_packed_neither_matrix(monkeypatch, folders, size):
    monkeypatch.setattr(fp4, "gpu_properties", lambda device: SimpleNamespace(major=9))
    with use_group(Group(0, size)):  # 48 or 24 of the 96 rows of a gate, and as many inputs of the second
        model = load(folders[0], dtype=torch.bfloat16)
        pack_weights(model)
        assert not any(weight.is_in_bricks for weight in both(model.model.layers[0].mlp.experts))


def test_weights_of_a_shape_are_random_matrices_of_its_format(folders):
    first, second = (load(folders[0], "dummy").model.layers[2].mlp.experts.weights for _ in range(2))
    for one, other in zip(first[:2], second[:2], strict=True):
        matrix = dequantise(one, torch.float32)
        assert one.is_mxfp4 and matrix.std().item() == pytest.approx(0.02, rel=0.1)
        assert torch.equal(matrix, dequantise(other, torch.float32))


NAME = "model.layers.1.mlp.experts.gate_up_proj"


def fewer_experts(tensors):
    tensors[f"{NAME}_blocks"] = tensors[f"{NAME}_blocks"][:3].contiguous()


def fewer_rows(tensors):
    tensors[f"{NAME}_scales"] = tensors[f"{NAME}_scales"][:, :-1].contiguous()


def another_dtype(tensors):
    tensors[f"{NAME}_blocks"] = tensors[f"{NAME}_blocks"].int()


def no_number(tensors):
    tensors[f"{NAME}_scales"][2, 5, 1] = 255


def no_scales(tensors):
    del tensors[f"{NAME}_scales"]


def no_bias(tensors):
    del tensors[f"{NAME}_bias"]


def short_bias(tensors):
    tensors[f"{NAME}_bias"] = tensors[f"{NAME}_bias"][:, :-2].contiguous()


def short_sinks(tensors):
    tensors["model.layers.0.self_attn.sinks"] = torch.zeros(3)


@pytest.mark.parametrize(
    "change, message",
    [
        (fewer_experts, f"tensor {NAME}_blocks: holds 3 experts, not 4"),
        (fewer_rows, rf"tensor {NAME}_scales: shape \(95, 2\), expected \(96, 2\)"),
        (another_dtype, f"tensor {NAME}_blocks: dtype torch.int32, expected torch.uint8"),
        (no_number, f"tensor {NAME}_scales: holds scales above 2"),
        (no_scales, f"has no tensor {NAME}_scales"),
        (no_bias, f"has no tensor {NAME}_bias"),
        (short_bias, rf"tensor {NAME}_bias: shape \(95,\), expected \(96,\)"),
        (short_sinks, r"tensor model.layers.0.self_attn.sinks: shape \(3,\), expected \(4,\)"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, folders, change, message):
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((folders[0] / file).read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    "name, value",
    [
        ("swiglu_limit", 8.0),
        ("swiglu_alpha", 1.0),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["full_attention", "sliding_attention", "chunked_attention"]),
        ("layer_types", "full_attention"),
        ("sliding_window", 0),
        ("sliding_window", "128"),
    ],
)
def test_settings_that_are_not_gpt_oss_are_refused_by_name(folders, name, value):
    config = json.loads((folders[0] / "config.json").read_text()) | {name: value}
    with pytest.raises(ValueError, match=name):
        read_config("config.json", config)


def test_without_layer_types_every_other_layer_has_a_window(tmp_path, folders):
    (tmp_path / "config.json").write_text((folders[0] / "config.json").read_text())
    edit_json(tmp_path / "config.json", layer_types=None)
    config = read_config("config.json", json.loads((tmp_path / "config.json").read_text()))
    assert config.windows == (24, 0, 24)


def test_experts_in_mxfp4_may_have_activations_of_8_bits_on_hopper_gpus(monkeypatch, tmp_path, folders):
    option, packed = dict(device="cpu", activation_dtype="fp8"), str(folders[0])
    with pytest.raises(
        ValueError, match="activation_dtype='fp8' is for weights in int4 and experts in MXFP4"
    ):
        LLM(str(make_checkpoint(tmp_path, "gpt_oss")), **option)
    with pytest.raises(ValueError, match="activation_dtype='fp8' needs a Hopper GPU"):
        LLM(packed, **option)
    monkeypatch.setattr(fp4, "gpu_properties", lambda device: SimpleNamespace(major=9))
    model = load(packed, dtype=torch.bfloat16, **option)
    pack_weights(model)
    assert all(layer.mlp.experts.weights.gate_up.rounds_inputs for layer in model.model.layers)
    assert all(layer.mlp.experts.weights.down.rounds_inputs for layer in model.model.layers)
