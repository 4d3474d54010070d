"""Damaged checkpoints of quantised weights: an error names the file and the tensor."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from open_checkpoints import open_checkpoint
from quantised_checkpoints import PACKERS, STATE, quantise
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from nanovllm.assembly import build_model
from nanovllm.distributed.group import Group, use_group
from nanovllm.utils.loader import load_model
from tiny_checkpoints import EXACT, edit_json, make_checkpoint, one_thread  # noqa: F401

DOWN, QUERY = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The folder of a checkpoint of this format."""
    floats = make_checkpoint(tmp_path_factory.mktemp("floats"), head_dim=16, intermediate_size=192)
    made = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = quantise(floats, tmp_path_factory.mktemp("packed"), PACKERS[name])
        return made[name]

    return get


def load(folder: Path) -> torch.nn.Module:
    checkpoint = open_checkpoint(folder)
    model = build_model(checkpoint.hf_config())
    load_model(model, checkpoint)
    return model


def copy_with(source: Path, target: Path, change: Callable[[dict], None]) -> Path:
    """The checkpoint after `change` has worked on its tensors."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())
    return target


def cut_rows(value: torch.Tensor) -> torch.Tensor:
    return value[:-1]


def cut_columns(value: torch.Tensor) -> torch.Tensor:
    return value[:, :-1]


def put(number: float, dtype: torch.dtype | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(value: torch.Tensor) -> torch.Tensor:
        value = value.to(dtype or value.dtype)
        value.view(-1)[3] = number
        return value

    return change


def swapped(value: torch.Tensor) -> torch.Tensor:
    """The first group's first input and the last group's last one change places."""
    value[[0, -1]] = value[[-1, 0]]
    return value


def as_bytes(text: bytes) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda value: torch.tensor([*text], dtype=torch.uint8)


def state(**changes) -> Callable[[torch.Tensor], torch.Tensor]:
    """What bitsandbytes says of a weight, with changes."""
    return lambda value: as_bytes(json.dumps(json.loads(bytes(value.tolist())) | changes).encode())(value)


# Format, end of the tensor's name, change, what is said of it.
CHANGED = {
    "scales of fewer rows": ("fp8 block", "weight_scale_inv", cut_rows, "shape (0, 2), expected (1, 2)"),
    "short rows of scales": ("fp8 block", "weight_scale_inv", cut_columns, "shape (1, 1), expected (1, 2)"),
    "scales of more dimensions": ("fp8 block", "weight_scale_inv", lambda v: v[None], "shape (1, 1, 2)"),
    "a scale that is NaN": ("float channel", "weight_scale", put(torch.nan), "holds NaN"),
    "an infinite scale": ("fp8 block", "weight_scale_inv", lambda v: v * torch.inf, "holds NaN, infinity"),
    "integer scales": ("float channel", "weight_scale", lambda v: v.int(), "dtype torch.int32"),
    "float64 scales": ("awq", "scales", lambda v: v.double(), "dtype torch.float64"),
    "a scale for each tensor": ("float channel", "weight_scale", lambda v: v[:1], "shape (1, 1)"),
    "two scales": ("float tensor", "weight_scale", lambda v: v.repeat(2), "shape (2,), expected (1, 1)"),
    "a weight that is NaN": ("fp8 block", "weight", put(torch.nan), "holds NaN"),
    "a weight in bfloat16": ("fp8 block", "weight", lambda v: v.bfloat16(), "dtype torch.bfloat16, expected"),
    "a weight in float8_e8m0": ("fp8 block", "weight", lambda v: v.view(torch.float8_e8m0fnu), "dtype"),
    "a weight of 8 bits": ("pack 4", "weight_packed", lambda v: v.to(torch.int8), "dtype torch.int8"),
    "a truncated weight": ("int channel", "weight", cut_columns, "shape (64, 191), expected (64, 192)"),
    "a truncated pack": ("pack 4", "weight_packed", cut_columns, "shape (64, 23), expected (64, 24)"),
    "a truncated pack of 8": ("pack 8", "weight_packed", cut_rows, "shape (63, 48), expected (64, 48)"),
    "a truncated pack of GPTQ": ("gptq", "qweight", cut_rows, "shape (23, 64), expected (24, 64)"),
    "a truncated pack of AWQ": ("awq", "qweight", cut_columns, "shape (192, 7), expected (192, 8)"),
    "scales of fewer groups": ("pack 4", "weight_scale", cut_columns, "shape (64, 5), expected (64, 6)"),
    "scales of fewer groups of GPTQ": ("gptq", "scales", cut_rows, "shape (5, 64), expected (6, 64)"),
    "zero points of fewer groups": ("awq", "qzeros", cut_rows, "shape (5, 8), expected (6, 8)"),
    "zero points of fewer rows": ("pack 4, asymmetric", "weight_zero_point", cut_rows, "shape (7, 3)"),
    "zero points of 8 bits": ("pack 8, asymmetric", "weight_zero_point", cut_rows, "shape (15, 1)"),
    "integer zero points": ("int group, asymmetric", "weight_zero_point", cut_rows, "shape (63, 3)"),
    "another zero point": ("gptq", "qzeros", put(0), "holds zero points other than 8"),
    "another shape": ("pack 4", "weight_shape", lambda v: v + 1, "holds [65, 193], expected [64, 192]"),
    "groups out of order": ("gptq", "g_idx", swapped, "out of order, which the configuration denies"),
    "an unknown group": ("gptq, ordered", "g_idx", put(99), "does not put 32 inputs into each group"),
    "a negative group": ("pack 4, ordered", "weight_g_idx", put(-1), "does not put 32 inputs"),
    "fewer inputs": ("gptq, ordered", "g_idx", cut_rows, "shape (191,), expected (192,)"),
    "a truncated pack of NVFP4": ("nvfp4", "weight_packed", cut_columns, "shape (64, 95), expected (64, 96)"),
    "scales of NVFP4 in float32": ("nvfp4", "weight_scale", lambda v: v.float(), "dtype torch.float32"),
    "a scale of NVFP4 that is NaN": ("nvfp4", "weight_scale", put(torch.nan), "holds NaN"),
    "a power of two that is NaN": ("mxfp4 of compressed-tensors", "weight_scale", put(255), "holds NaN"),
    "a factor of 0": ("nvfp4", "weight_global_scale", lambda v: v * 0, "a number above 0, got 0.0"),
    "an infinite factor": ("modelopt nvfp4", "weight_scale_2", lambda v: v * torch.inf, "above 0, got inf"),
    "a truncated nf4": ("nf4", "weight", cut_rows, "shape (6143, 1), expected (6144, 1)"),
    "nf4 in words": ("nf4", "weight", lambda v: v.view(torch.int8), "dtype torch.int8, expected torch.uint8"),
    "fewer scales of nf4": ("nf4", "weight.absmax", cut_rows, "shape (191,), expected (192,)"),
    "a scale of nf4 that is NaN": ("nf4", "weight.absmax", put(torch.nan), "holds NaN"),
    "nested scales where there are none": ("nf4", "weight.absmax", lambda v: v.byte(), "dtype torch.uint8"),
    "scales that are not nested": ("nf4, nested", "weight.absmax", lambda v: v.float(), "torch.float32"),
    "fewer nested scales": ("nf4, nested", "weight.absmax", cut_rows, "shape (191,), expected (192,)"),
    "too many scales of scales": (
        "nf4, nested", "weight.nested_absmax", lambda v: v.repeat(2), "shape (2,), expected (1,)"),
    "a short table of scales": (
        "nf4, nested", "weight.nested_quant_map", cut_rows, "shape (255,), expected (256,)"),
    "another table": ("nf4", "weight.quant_map", put(0), "must be the table of nf4, got"),
    "a short table": ("nf4", "weight.quant_map", cut_rows, "shape (15,), expected (16,)"),
    "another shape of nf4": ("nf4", STATE, state(shape=[192, 64]), "shape = [192, 64] is not supported"),
    "other blocks of nf4": ("nf4", STATE, state(blocksize=128), "blocksize = 128 is not supported"),
    "other blocks of scales": (
        "nf4, nested", STATE, state(nested_blocksize=64), "nested_blocksize = 64 is not supported"),
    "fp4 by its state": ("nf4", STATE, state(quant_type="fp4"), "quant_type = 'fp4' is not supported"),
    "an offset that is none": (
        "nf4, nested", STATE, state(nested_offset="0"), "nested_offset must be a number, got '0'"),
    "an offset that is NaN": ("nf4, nested", STATE, state(nested_offset=float("nan")), "a number, got nan"),
    "a state that is no JSON": ("nf4", STATE, cut_rows, "Expecting ',' delimiter"),
    "a state that is no object": ("nf4", STATE, as_bytes(b"[]"), "must be an object, got []"),
    "a state in another alphabet": ("nf4", STATE, as_bytes(b'"\xff"'), "can't decode byte"),
    "a deep state": ("nf4", STATE, as_bytes(b"[" * 512), "Expecting value"),
    "a long state": ("nf4", STATE, as_bytes(b" " * 10**6), "shape (1000000,), expected (512,)"),
    "rows of no largest number": ("int8 of bitsandbytes", "SCB", cut_rows, "shape (63,), expected (64,)"),
    "an infinite largest number": ("int8 of bitsandbytes", "SCB", put(torch.inf), "holds NaN, infinity"),
    "largest numbers of 16 bits": ("int8 of bitsandbytes", "SCB", lambda v: v.half(), "dtype torch.float16"),
    "another layout": ("int8 of bitsandbytes", "weight_format", lambda v: v + 1, "must be 0, for codes row"),
    "two factors": ("nvfp4", "weight_global_scale", lambda v: v.repeat(2), "shape (2,), expected (1,)"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_tensor_is_refused_by_name(tmp_path, packed, name):
    format, end, change, message = CHANGED[name]

    def work(tensors: dict) -> None:
        tensors[f"{DOWN}.{end}"] = change(tensors[f"{DOWN}.{end}"])

    folder = copy_with(packed(format), tmp_path, work)
    with pytest.raises(ValueError, match=re.escape(f"model.safetensors: tensor {DOWN}.{end}: ") + ".*"
                       + re.escape(message)):  # fmt: skip
        load(folder)


NEEDED = [
    (name, end)
    for name, ends in {
        "fp8 block": "weight weight_scale_inv",
        "float channel": "weight weight_scale",
        "int group, asymmetric": "weight weight_scale weight_zero_point",
        "pack 8, asymmetric": "weight_packed weight_scale weight_zero_point",
        "pack 4, ordered": "weight_packed weight_scale weight_g_idx",
        "gptq, ordered": "qweight scales qzeros g_idx",
        "awq": "qweight scales qzeros",
        "nvfp4": "weight_packed weight_scale weight_global_scale",
        "modelopt nvfp4": "weight weight_scale weight_scale_2",
        "nf4": f"weight weight.absmax weight.quant_map {STATE}",
        "nf4, nested": f"weight.absmax weight.nested_absmax weight.nested_quant_map {STATE}",
        "int8 of bitsandbytes": "weight SCB",
    }.items()
    for end in ends.split()
]


@pytest.mark.parametrize("name, end", NEEDED)
def test_a_missing_tensor_is_named(tmp_path, packed, name, end):
    folder = copy_with(packed(name), tmp_path, lambda tensors: tensors.pop(f"{QUERY}.{end}"))
    with pytest.raises(ValueError, match=re.escape(f"{folder} has no tensor {QUERY}.{end}")):
        load(folder)


def test_scales_of_different_dtypes_in_one_matrix_are_refused(tmp_path, packed):
    def change(tensors: dict) -> None:
        tensors[f"{QUERY}.scales"] = tensors[f"{QUERY}.scales"].bfloat16()

    with pytest.raises(ValueError, match=r"proj.scales: dtype .* but a part of the same matrix has"):
        load(copy_with(packed("gptq"), tmp_path, change))


def test_parts_with_different_orders_of_inputs_are_refused(tmp_path, packed):
    def change(tensors: dict) -> None:
        tensors[f"{QUERY}.g_idx"] = tensors[f"{QUERY}.g_idx"].flip(0)

    with pytest.raises(ValueError, match="proj.g_idx: puts inputs in another order than a part of the same"):
        load(copy_with(packed("gptq, ordered"), tmp_path, change))


def test_inputs_out_of_order_are_refused_where_ranks_divide_them(packed):
    with use_group(Group(1, 2)), pytest.raises(ValueError, match="g_idx: .* works on one rank only"):
        load(packed("gptq, ordered"))


@pytest.mark.parametrize("group_size", [48, 33, 64, 1, 2**20])
@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_a_group_size_that_does_not_fit_the_scales_is_refused(tmp_path, packed, name, group_size):
    folder = copy_with(packed(name), tmp_path, lambda tensors: None)
    edit_json(folder / "config.json", quantization_config=PACKERS[name].config | {"group_size": group_size})
    with pytest.raises(ValueError, match=r"tensor model\.layers\.\d\.\S+: (shape|does not put|groups of 33)"):
        load(folder)


def test_tensors_of_another_format_have_no_place(tmp_path, packed):
    folder = copy_with(packed("pack 4, asymmetric"), tmp_path, lambda tensors: None)
    edit_json(folder / "config.json", quantization_config=PACKERS["gptq"].config)
    with pytest.raises(ValueError, match="has no place"):
        load(folder)


def test_quantised_tensors_without_a_configuration_are_refused(tmp_path, packed):
    folder = copy_with(packed("fp8 block"), tmp_path, lambda tensors: None)
    edit_json(folder / "config.json", quantization_config=None)
    with pytest.raises(
        ValueError, match="proj.weight: dtype torch.float8_e4m3fn|weight_scale_inv has no place"
    ):
        load(folder)


def test_a_quantised_lm_head_is_refused(tmp_path, packed):
    def change(tensors: dict) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)

    with pytest.raises(ValueError, match="lm_head.weight: dtype torch.float8_e4m3fn"):
        load(copy_with(packed("fp8 block"), tmp_path, change))


def test_a_bias_that_the_model_does_not_have_must_be_zero(tmp_path, packed):
    def add(number: float) -> Callable[[dict], None]:
        return lambda tensors: tensors.update({f"{QUERY}.bias": torch.full((64,), number)})

    load(copy_with(packed("gptq"), tmp_path, add(0.0)))
    with pytest.raises(ValueError, match="q_proj.bias: is a bias, which the model does not have"):
        load(copy_with(packed("gptq"), tmp_path, add(0.5)))


def test_scales_of_an_8_bit_cache_and_of_activations_are_not_needed(tmp_path, packed):
    def change(tensors: dict) -> None:
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
        tensors["model.layers.0.self_attn.v_scale"] = torch.ones(1)
        tensors[f"{QUERY}.input_scale"] = torch.ones(1)

    load(copy_with(packed("float tensor"), tmp_path, change))


def test_files_of_4_bits_a_weight_have_room_for_their_model(tmp_path, packed, monkeypatch):
    folder = copy_with(packed("awq"), tmp_path, lambda tensors: None)
    large = dict(num_hidden_layers=200, hidden_size=1024, intermediate_size=3072, layer_types=None)
    edit_json(folder / "config.json", **large)
    with open(folder / "model.safetensors", "ab") as file:
        file.truncate(1_500_000_000)  # 2.8e9 weights
    assert open_checkpoint(folder).hf_config().num_hidden_layers == 200
    edit_json(folder / "config.json", quantization_config=None)
    with pytest.raises(ValueError, match="describes a larger model than its files can hold"):
        open_checkpoint(folder).hf_config()


def test_rows_of_nf4_must_be_whole_blocks(tmp_path):
    floats = make_checkpoint(tmp_path / "floats", intermediate_size=96)
    folder = quantise(floats, tmp_path / "packed", PACKERS["nf4"], kept=("down_proj",))
    with pytest.raises(ValueError, match="down_proj.weight: inputs must be a multiple of 64, got 96"):
        load(folder)


def test_scales_that_overflow_together_are_refused(tmp_path, packed):
    def change(tensors: dict) -> None:
        for end in ("nested_absmax", "nested_quant_map"):
            tensors[f"{DOWN}.weight.{end}"] *= 1e30

    with pytest.raises(ValueError, match=r"down_proj.weight.\S+: holds NaN, infinity"):
        load(copy_with(packed("nf4, nested"), tmp_path, change))


def test_an_engine_says_which_tensor_is_damaged(tmp_path, packed):
    folder = copy_with(packed("awq"), tmp_path, lambda tensors: tensors.pop(f"{DOWN}.scales"))
    with pytest.raises(ValueError, match=re.escape(f"has no tensor {DOWN}.scales")):
        LLM(str(folder), **EXACT)
