"""Quantised weights: the matrix is bit for bit what the format's own library makes of the stored tensors, on
any rank, and engines that keep it packed answer as transformers does with the unpacked one.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from forked_ranks import forked_ranks  # noqa: F401
from open_checkpoints import open_checkpoint
from quantised_checkpoints import PACKERS, Packer, gptq, quantise
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm import LLM, SamplingParams
from nanovllm.assembly import build_model
from nanovllm.distributed.group import Group, use_group
from nanovllm.extensions.experts.moe import Router, StackedLinear
from nanovllm.extensions.quantised import integers, memory, products, scaled
from nanovllm.extensions.quantised.assignment import set_weight, without_weights
from nanovllm.extensions.quantised.formats import read_scheme
from nanovllm.extensions.quantised.kernels.quantised_weight import dequantise_torch
from nanovllm.extensions.quantised.products import CodesProduct, Int4Product, UnpackedInt4Product
from nanovllm.extensions.safety.options import ExtendedConfig
from nanovllm.layers.linear import (
    DenseWeight,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from nanovllm.utils.loader import load_model, pack_weights
from tiny_checkpoints import EXACT, assert_greedy, edit_json, load_reference, make_checkpoint, one_thread  # noqa: F401

# Neither blocks of 128 nor groups of 64 end where the parts of two ranks do.
SIZES = dict(
    hidden_size=192, intermediate_size=320, head_dim=48, num_attention_heads=4, num_key_value_heads=2
)
HIDDEN, WIDTH, HEAD = 192, 320, 48
LAYERS = {  # how a layer is made, and the rows and columns of its parts
    "qkv": (lambda: QKVParallelLinear(HIDDEN, HEAD, 4, 2), {"q": (192, 192), "k": (96, 192), "v": (96, 192)}),
    "gate and up": (lambda: MergedColumnParallelLinear(HIDDEN, [320, 320]), {0: (320, 192), 1: (320, 192)}),
    "down": (lambda: RowParallelLinear(WIDTH, HIDDEN), {None: (192, 320)}),
    "replicated": (lambda: ReplicatedLinear(HIDDEN, WIDTH), {None: (320, 192)}),
}
PROMPTS = [[1, 2, 3], [*range(40)], [7] * 17]
GREEDY = SamplingParams(0, 10, True)


def make_layer(make, packer: Packer, rank: int = 0, size: int = 1) -> LinearBase:
    with use_group(Group(rank, size)), without_weights():
        layer = make()
    format = read_scheme(packer.config, None).find("model.layers.0.any")
    set_weight(layer, format.kind(layer.shards, **format.settings))
    return layer


def load_parts(layer: LinearBase, packed: dict) -> None:
    """`packed`: shard_id -> tensors by the ends of their names."""
    places = {name.removeprefix("layer."): place for name, place in layer.stored_tensors("layer").items()}
    for shard_id, tensors in packed.items():
        assert {name for name, place in places.items() if not place.is_optional} <= tensors.keys()
        for name, tensor in tensors.items():
            places[name].load(tensor, shard_id)
    layer.matrix.finish()


def matrix_of(layer: LinearBase) -> torch.Tensor:
    """The layer's matrix, inputs in the order of x."""
    weight = layer.matrix.quantised
    matrix = dequantise_torch(weight, slice(0, weight.shape[0]), weight.product_dtype).float()
    order = getattr(layer.matrix, "order", None)
    return matrix if order is None else matrix[:, order.argsort()]


def expected_matrix(layer: LinearBase, packer: Packer, packed: dict) -> torch.Tensor:
    whole = {shard_id: packer.unpack(tensors) for shard_id, tensors in packed.items()}
    return torch.cat([whole[key][part.rows, part.columns] for key, part in layer.shards.items()])


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("packer", PACKERS.values(), ids=PACKERS)
def test_the_matrix_is_bit_for_bit_the_librarys_on_every_rank(packer, name):
    torch.manual_seed(0)
    make, shapes = LAYERS[name]
    packed = {shard_id: packer.pack(torch.randn(shape) * 0.3) for shard_id, shape in shapes.items()}
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        layer = make_layer(make, packer, rank, size)
        if getattr(layer.matrix, "order", None) is not None and size == 2 and name == "down":
            with pytest.raises(ValueError, match="works on one rank only"):
                load_parts(layer, packed)
            continue
        load_parts(layer, packed)
        expected = expected_matrix(layer, packer, packed)
        assert torch.equal(matrix_of(layer), expected)
        assert_products(layer, expected)


def test_codes_of_nf4_made_here_are_those_of_the_nearest_numbers():
    packer, (make, shapes) = PACKERS["nf4"], LAYERS["replicated"]
    matrix = torch.randn(shapes[None])
    layer = make_layer(make, packer)
    layer.matrix.fill(matrix)
    assert torch.equal(matrix_of(layer), packer.unpack(packer.pack(matrix)))


@pytest.mark.parametrize("is_nested", [False, True])
def test_what_bitsandbytes_itself_packs_is_what_it_unpacks(is_nested):
    functional = pytest.importorskip("bitsandbytes.functional")
    packer, (make, shapes) = PACKERS["nf4, nested" if is_nested else "nf4"], LAYERS["gate and up"]
    packed, expected = {}, []
    for shard_id, shape in shapes.items():
        weight, state = functional.quantize_4bit(
            torch.randn(shape), blocksize=64, compress_statistics=is_nested, quant_type="nf4"
        )
        ends = {f"weight.{end}": tensor for end, tensor in state.as_dict(packed=True).items()}
        packed[shard_id] = {"weight": weight} | ends
        expected.append(functional.dequantize_4bit(weight, state))
        assert torch.equal(packer.unpack(packed[shard_id]), expected[-1])
    layer = make_layer(make, packer)
    load_parts(layer, packed)
    assert torch.equal(matrix_of(layer), torch.cat(expected))


def test_so_it_is_with_its_rows_of_8_bits():
    functional = pytest.importorskip("bitsandbytes.functional")
    packer, (make, shapes) = PACKERS["int8 of bitsandbytes"], LAYERS["replicated"]
    packed = packer.pack(torch.randn(shapes[None]))
    layer = make_layer(make, packer)
    load_parts(layer, {None: packed})
    theirs = functional.int8_vectorwise_dequant(packed["weight"], packed["SCB"])
    torch.testing.assert_close(matrix_of(layer), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["nvfp4", "modelopt nvfp4", "mxfp4 of compressed-tensors"])
def test_codes_of_4_bits_may_be_cut_anywhere_and_loaded_again(name):
    packer = PACKERS[name]
    for rank in (0, 1, 31):
        layer = make_layer(lambda: RowParallelLinear(96, 24), packer, rank, 32)  # 3 inputs each
        for _ in range(2):
            packed = {None: packer.pack(torch.randn(24, 96))}
            load_parts(layer, packed)
            layer.matrix.finish()  # as it is when another weight alone is loaded again
            assert torch.equal(matrix_of(layer), expected_matrix(layer, packer, packed))


@pytest.mark.parametrize("name", ["gptq, ordered", "pack 4, ordered"])
def test_inputs_are_put_in_order_once(name):
    packer, (make, shapes) = PACKERS[name], LAYERS["qkv"]
    layer = make_layer(make, packer)
    for _ in range(2):
        packed = {shard_id: packer.pack(torch.randn(shape)) for shard_id, shape in shapes.items()}
        load_parts(layer, packed)
        layer.matrix.finish()  # as it is when another weight alone is loaded again
        assert torch.equal(matrix_of(layer), expected_matrix(layer, packer, packed))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4 of compressed-tensors"])
def test_kernels_read_codes_of_4_bits_whatever_shares_a_scale(name):
    make, _ = LAYERS["replicated"]
    assert make_layer(make, PACKERS[name]).matrix.quantised.can_be_read()


@pytest.mark.parametrize("name", ["gptq, asymmetric", "gptq v2", "pack 4, asymmetric", "awq"])
@pytest.mark.parametrize("sign, zero", [(1, 0), (-1, 15)])
def test_the_zero_point_of_weights_of_one_sign_is_the_first_or_the_last(name, sign, zero):
    """Less 1, as version 1 of GPTQ stores it, the first is the last of 4 bits."""
    packer, (make, shapes) = PACKERS[name], LAYERS["replicated"]
    packed = {shard_id: packer.pack(sign * (torch.rand(shape) + 0.1)) for shard_id, shape in shapes.items()}
    layer = make_layer(make, packer)
    load_parts(layer, packed)
    assert layer.matrix.zeros.unique().tolist() == [zero]
    assert torch.equal(matrix_of(layer), expected_matrix(layer, packer, packed))


@pytest.mark.parametrize("sign, zero", [(1, -128), (-1, 127)])
def test_so_it_is_with_8_bits(sign, zero):
    packer, (make, shapes) = gptq(64, bits=8, sym=False), LAYERS["replicated"]
    packed = {shard_id: packer.pack(sign * (torch.rand(shape) + 0.1)) for shard_id, shape in shapes.items()}
    layer = make_layer(make, packer)
    load_parts(layer, packed)
    assert layer.matrix.zeros.unique().tolist() == [zero]
    assert torch.equal(matrix_of(layer), expected_matrix(layer, packer, packed))


def assert_products(layer: LinearBase, expected: torch.Tensor) -> None:
    """They are those of the expected matrix, but for one rounding."""
    x, bias = torch.randn(5, expected.shape[1]), torch.randn(len(expected))
    y, exact = layer.matrix.multiply(x, bias), x.double() @ expected.double().T + bias
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=2**-20 * exact.abs().max().item())
    y = layer.matrix.multiply(x.bfloat16(), None).double()
    exact = x.bfloat16().double() @ expected.bfloat16().double().T
    torch.testing.assert_close(y, exact, rtol=2**-8, atol=2**-8 * exact.abs().max().item())


ODD = {  # eight ranks with 5 inputs or 6 outputs each, of packs of eight
    "qkv": (lambda: QKVParallelLinear(64, 6, 8, 8), dict.fromkeys("qkv", (48, 64)), [*PACKERS]),
    "down": (lambda: RowParallelLinear(40, 24), {None: (24, 40)}, [
        "fp8 block", "fp8 tensor", "float channel", "int channel", "pack 8, asymmetric", "pack 4, channel",
        "gptq, one group",
    ]),
}  # fmt: skip


@pytest.mark.parametrize(
    "layer, name", [(layer, name) for layer, (*_, names) in ODD.items() for name in names]
)
def test_cuts_through_bytes_and_packs_are_right(layer, name):
    make, shapes, _ = ODD[layer]
    packer = PACKERS[name]
    packed = {shard_id: packer.pack(torch.randn(shape)) for shard_id, shape in shapes.items()}
    for rank in (0, 1, 3, 7):
        made = make_layer(make, packer, rank, 8)
        load_parts(made, packed)
        assert torch.equal(matrix_of(made), expected := expected_matrix(made, packer, packed))
        assert_products(made, expected)


@pytest.mark.parametrize("name", ["fp8 block", "pack 8", "awq"])
def test_large_matrices_are_multiplied_in_pieces(monkeypatch, name):
    monkeypatch.setattr(scaled, "PIECE", 30_000)
    make, shapes = LAYERS["gate and up"]
    packed = {shard_id: PACKERS[name].pack(torch.randn(shape)) for shard_id, shape in shapes.items()}
    layer = make_layer(make, PACKERS[name])
    load_parts(layer, packed)
    assert len([*layer.matrix.pieces(640)]) > 3
    assert_products(layer, expected_matrix(layer, PACKERS[name], packed))


# Whole engines


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    """Checkpoints of float weights, by architecture."""
    made = {}

    def get(architecture: str) -> Path:
        if architecture not in made:
            folder = tmp_path_factory.mktemp(architecture)
            made[architecture] = make_checkpoint(folder, architecture, **SIZES, moe_intermediate_size=192)
        return made[architecture]

    return get


ENGINES = [
    ("qwen3", "fp8 block, bf16 scales"),
    ("llama", "fp8 tensor"),
    ("llama", "modelopt"),
    ("qwen3", "modelopt, rows"),
    ("llama", "modelopt nvfp4"),
    ("qwen2", "nvfp4"),
    ("qwen3", "mxfp4 of compressed-tensors"),
    ("qwen2", "float channel"),
    ("qwen3", "pack 4, asymmetric"),
    ("qwen2", "pack 8"),
    ("llama", "gptq, ordered"),
    ("qwen2", "gptq, asymmetric"),
    ("qwen2", "gptq 8, asymmetric and ordered"),
    ("qwen3", "awq"),
    ("llama", "nf4"),
    ("qwen2", "nf4, nested"),
    ("qwen3", "int8 of bitsandbytes"),
    ("qwen3_moe", "nf4, nested"),
    ("qwen3_moe", "int8 of bitsandbytes"),
    *(("qwen3_moe", name) for name in ("fp8 block", "fp8 tensor", "float channel", "int channel")),
    *(("qwen3_moe", name) for name in ("pack 4, asymmetric", "gptq", "awq", "nvfp4", "modelopt nvfp4")),
]


def assert_answers_as(folder: Path, reference: Path, **options) -> None:
    theirs = load_reference(reference)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=40, **options) as llm:
        for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False), strict=True):
            assert_greedy(theirs, prompt, result["token_ids"])


@pytest.mark.parametrize("architecture, name", ENGINES)
def test_an_engine_answers_as_transformers_does_with_the_unpacked_weights(
    tmp_path, floats, architecture, name
):
    reference = tmp_path / "reference"
    folder = quantise(floats(architecture), tmp_path / "packed", PACKERS[name], reference)
    assert_answers_as(folder, reference)


@pytest.mark.parametrize(
    "architecture, name",
    [("qwen3", "pack 4, asymmetric"), ("qwen3", "nf4, nested"), ("qwen3_moe", "fp8 block")],
)
def test_two_ranks_answer_as_one(tmp_path, floats, architecture, name):
    reference = tmp_path / "reference"
    folder = quantise(floats(architecture), tmp_path / "packed", PACKERS[name], reference)
    assert_answers_as(folder, reference, tensor_parallel_size=2)


def load(folder: Path, quantization: str | None = None, load_format: str = "auto") -> torch.nn.Module:
    checkpoint = open_checkpoint(folder, load_format)
    model = build_model(checkpoint.hf_config(), quantization)
    load_model(model, checkpoint)
    return model


def linear_layers(model: torch.nn.Module) -> dict[str, LinearBase]:
    """All but routers, which are never quantised."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LinearBase)}
    return {name: layer for name, layer in layers.items() if not isinstance(layer, Router)}


def with_config(packer: Packer, **changes) -> Packer:
    return Packer(packer.config | changes, packer.pack, packer.unpack)


@pytest.mark.parametrize(
    "packer",
    [
        with_config(PACKERS["fp8 block"], modules_to_not_convert=["lm_head", "model.layers.0.mlp", "o_proj"]),
        with_config(PACKERS["fp8 block"], ignored_layers=[r".*\.0\.mlp", "self_attn.o_proj"]),
        with_config(PACKERS["awq"], modules_to_not_convert=["layers.0.mlp", "o_proj"]),
        with_config(PACKERS["nf4"], llm_int8_skip_modules=["lm_head", "model.layers.0.mlp", "o_proj"]),
        with_config(PACKERS["pack 4"], ignore=["lm_head", "model.layers.0.mlp.down_proj", "re:.*o_proj$",
                                               r"re:model\.layers\.0\.mlp\.(gate|up)_proj"]),
        with_config(PACKERS["gptq"], dynamic={r"-:.*\.0\.mlp\.": {}, r"-:.*o_proj": {}}),
        with_config(PACKERS["auto-round"], extra_config={
            "model.layers.0.mlp.down_proj": {"bits": 16}, "model.layers.0.mlp.up_proj": {"bits": 16},
            "model.layers.0.mlp.gate_proj": {"bits": 16}, "model.layers.0.self_attn.o_proj": {"bits": 16},
            "model.layers.1.self_attn.o_proj": {"bits": 16}}),
    ],
    ids=lambda packer: packer.config["quant_method"],
)  # fmt: skip
def test_layers_that_are_listed_as_not_converted_stay_as_they_are(tmp_path, floats, packer):
    kept = ("o_proj", *(f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")))
    folder = quantise(floats("qwen3"), tmp_path / "packed", packer, tmp_path / "reference", kept)
    layers, expected = linear_layers(load(folder)), linear_layers(load(tmp_path / "reference"))
    assert {name for name, layer in layers.items() if isinstance(layer.matrix, DenseWeight)} == {
        "model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj",
        "model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.down_proj",
    }  # fmt: skip
    for name, layer in layers.items():
        matrix = layer.weight if isinstance(layer.matrix, DenseWeight) else matrix_of(layer)
        assert torch.equal(matrix, expected[name].weight), name


def test_modules_in_block_to_quantize_says_which_layers_are_quantised(tmp_path, floats):
    inside = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.gate_proj", "mlp.up_proj"]]
    packer = with_config(PACKERS["gptq"], modules_in_block_to_quantize=inside)
    folder = quantise(floats("qwen3"), tmp_path / "packed", packer, kept=("o_proj", "down_proj"))
    plain = {
        name.rpartition(".")[2]
        for name, layer in linear_layers(load(folder)).items()
        if isinstance(layer.matrix, DenseWeight)
    }
    assert plain == {"o_proj", "down_proj"}


def test_groups_of_layers_have_formats_of_their_own(tmp_path, floats):
    eight, four = PACKERS["pack 8"], PACKERS["pack 4"]
    groups = {"all": four.config["config_groups"]["group_0"], "mlp": eight.config["config_groups"]["group_0"]}
    groups["mlp"] = groups["mlp"] | {"targets": ["re:.*mlp.*"]}
    mlp = ("gate_proj", "up_proj", "down_proj")
    quantise(floats("qwen3"), tmp_path / "four", with_config(four, config_groups=groups), kept=mlp)
    quantise(floats("qwen3"), tmp_path / "eight", eight, kept=("q_proj", "k_proj", "v_proj", "o_proj"))
    tensors = {n: t for n, t in load_file(tmp_path / "four" / "model.safetensors").items() if "mlp" not in n}
    packed = load_file(tmp_path / "eight" / "model.safetensors")
    tensors |= {n: t for n, t in packed.items() if "mlp" in n}
    save_file(tensors, tmp_path / "four" / "model.safetensors")
    kinds = {
        name: type(layer.matrix).__name__ for name, layer in linear_layers(load(tmp_path / "four")).items()
    }
    assert {kind for name, kind in kinds.items() if "mlp" in name} == {"Int8"}
    assert {kind for name, kind in kinds.items() if "attn" in name} == {"Int4"}


def test_of_several_groups_a_layer_has_that_which_the_library_chooses():
    names = [f"model.layers.{i}.{part}" for i in range(3) for part in ("self_attn.q_proj", "mlp.up_proj")]
    targets = [["Linear"], ["re:.*mlp.*", "model.layers.1.self_attn.q_proj"], [r"re:.*\.1\..*"], [names[2]]]
    targets += [[r"re:.*layers\.2.*", "re:.*up_proj"], ["re:.*up_proj"]]
    groups = {
        str(i): {"targets": each, "weights": {"num_bits": 4, "strategy": "group", "group_size": 16 << i}}
        for i, each in enumerate(targets)
    }
    config = COMPRESSED | {"config_groups": groups, "ignore": [], "sparsity_config": {"format": "dense"}}
    model = torch.nn.Module()
    for name in names:
        inner = model
        for part in name.split("."):
            inner.add_module(part, getattr(inner, part, torch.nn.Linear(16, 16)))
            inner = getattr(inner, part)
    theirs = QuantizationConfig.model_validate(config | {"quantization_status": "compressed"})
    apply_quantization_config(model, theirs)
    found = {name: read_scheme(config, None).find(name).settings["stored_tile"][1] for name in names}
    assert found == {name: model.get_submodule(name).quantization_scheme.weights.group_size for name in names}
    assert len({*found.values()}) >= 3


def test_parts_of_one_matrix_must_have_one_format(tmp_path, floats):
    packer = with_config(PACKERS["fp8 block"], modules_to_not_convert=["k_proj"])
    folder = quantise(floats("qwen3"), tmp_path / "packed", packer, kept=("k_proj",))
    with pytest.raises(ValueError, match=r"qkv_proj needs one format.*q_proj: fp8.*k_proj: not quantised"):
        load(folder)


# What is refused

COMPRESSED = PACKERS["pack 4"].config
WEIGHTS = COMPRESSED["config_groups"]["group_0"]["weights"]


def with_weights(form: str = "pack-quantized", **changes) -> dict:
    return COMPRESSED | {
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS | changes}},
    }


ROUNDED = {"activation_dtype": "fp8"}  # the option, as formats get it
GPTQ, FP8, AWQ, MODELOPT, NF4 = (
    PACKERS[name].config for name in ("gptq", "fp8 block", "awq", "modelopt", "nf4")
)
REFUSED = [
    ({}, "quant_method = None"),
    ({"quant_method": "hqq"}, "quant_method = 'hqq' .* supported: 'fp8'"),
    ({"quant_method": ["fp8"]}, "quant_method"),
    (FP8 | {"weight_block_size": [64, 64]}, r"weight_block_size = \[64, 64\]"),
    (FP8 | {"weight_block_size": "128"}, "weight_block_size"),
    (FP8 | {"fmt": "e5m2"}, "fmt = 'e5m2'"),
    (FP8 | {"activation_scheme": "none"}, "activation_scheme"),
    (FP8 | {"scale_fmt": 3}, "scale_fmt"),
    (FP8 | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list"),
    (FP8 | {"modules_to_not_convert": [7]}, "modules_to_not_convert must be a list"),
    (FP8 | {"modules_to_not_convert": ["a"] * 5000}, "modules_to_not_convert has more than"),
    (FP8 | {"ignored_layers": ["("]}, "ignored_layers: '\\('"),
    (MODELOPT | {"quant_algo": "NVFP4_AWQ"}, "quant_algo = 'NVFP4_AWQ' .* supported: 'FP8'"),
    (MODELOPT | {"quant_algo": "NVFP4", "group_size": 32}, "group_size = 32 .* supported: 16"),
    (MODELOPT | {"quant_algo": ["FP8"]}, "quant_algo"),
    (MODELOPT | {"ignore": "lm_head"}, "ignore must be a list"),
    (MODELOPT | {"ignore": ["re:("]}, "ignore: '\\('"),
    (MODELOPT | {"ignore": ["*" * 9]}, "ignore: .* is not a pattern"),
    (GPTQ | {"bits": 2}, "bits = 2"),
    (GPTQ | {"bits": "4"}, "bits = '4'"),
    (GPTQ | {"bits": True}, "bits = True"),
    (GPTQ | {"group_size": 0}, "group_size .* 0"),
    (GPTQ | {"group_size": -2}, "group_size .* -2"),
    (GPTQ | {"group_size": None}, "group_size .* None"),
    (GPTQ | {"group_size": 2**40}, "group_size"),
    (GPTQ | {"desc_act": 1}, "desc_act"),
    (GPTQ | {"sym": "yes"}, "sym"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
    (GPTQ | {"lm_head": True}, "lm_head = True"),
    (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic"),
    (GPTQ | {"dynamic": ["-:.*"]}, "dynamic"),
    (GPTQ | {"dynamic": {"-:(a+)+$": {}}}, "repeats too much"),
    (GPTQ | {"modules_in_block_to_quantize": [[1]]}, "modules_in_block_to_quantize"),
    (GPTQ | {"packing_format": "auto_round:auto_awq", "quant_method": "auto-round"}, "packing_format"),
    (GPTQ | {"quant_method": "auto-round"}, "packing_format = None"),
    (AWQ | {"bits": 8}, "bits = 8"),
    (AWQ | {"version": "gemv"}, "version = 'gemv'"),
    (AWQ | {"zero_point": False}, "zero_point = False"),
    (NF4 | {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type = 'fp4' .* supported: 'nf4'"),
    (NF4 | {"bnb_4bit_quant_type": None}, "bnb_4bit_quant_type = 'fp4'"),
    (NF4 | {"bnb_4bit_use_double_quant": 1}, "bnb_4bit_use_double_quant = 1"),
    (NF4 | {"load_in_8bit": "no"}, "load_in_8bit = 'no'"),
    (NF4 | {"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules must be a list"),
    (COMPRESSED | {"format": "mxfp8-quantized"}, "format = 'mxfp8-quantized'"),
    (COMPRESSED | {"format": "nvfp4-pack-quantized"}, "weights.type = 'int' .* supported: 'float'"),
    (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    (COMPRESSED | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    (COMPRESSED | {"config_groups": {}}, "config_groups"),
    (COMPRESSED | {"config_groups": {"g": 7}}, "config_groups"),
    (COMPRESSED | {"config_groups": {"g": {"targets": ["Linear"]}}}, "config_groups.g.weights"),
    (COMPRESSED | {"config_groups": {"g": {"targets": 5, "weights": WEIGHTS}}}, "config_groups.g.targets"),
    (COMPRESSED | {"ignore": ["re:(.*)*x"]}, "ignore: '\\(\\.\\*\\)\\*x' .* repeats too much"),
    (COMPRESSED | {"ignore": ["re:" + ".*" * 20 + "x"]}, "ignore: .* repeats too much"),
    (COMPRESSED | {"ignore": ["re:" + ".?" * 20 + "x"]}, "ignore: .* repeats too much"),
    (COMPRESSED | {"ignore": ["re:" + "(?:.|.)" * 10 + "x"]}, "ignore: .* repeats too much"),
    (with_weights(num_bits=2), "weights.num_bits = 2"),
    (with_weights(type="float"), "weights.type = 'float'"),
    (with_weights(strategy="block"), "weights.strategy = 'block'"),
    (with_weights(strategy=None), "weights.strategy = None"),
    (with_weights(dynamic=True), "weights.dynamic"),
    (with_weights(group_size=0), "weights.group_size"),
    (with_weights(actorder="first"), "weights.actorder"),
    (with_weights(symmetric=0), "weights.symmetric"),
    (with_weights("float-quantized", type="float", num_bits=8, strategy="block", block_structure=[1, 128]),
     "weights.block_structure"),
    (with_weights("float-quantized", type="float", num_bits=8, symmetric=False), "weights.symmetric"),
]  # fmt: skip


@pytest.mark.parametrize("config, message", REFUSED, ids=[message for _, message in REFUSED])
def test_what_a_format_cannot_express_is_refused_by_field(config, message):
    with pytest.raises(ValueError, match=f"quantization_config: .*{message}"):
        read_scheme(config, None)


def test_modelopt_lists_what_it_leaves_out_with_stars_and_expressions():
    ignored = ["lm_head", "model.layers.1*", "*.o_proj", "re:.*up_pr.j", "model.embed"]
    find = read_scheme(MODELOPT | {"ignore": ignored}, None).find
    left_out = [
        "lm_head",
        "model.layers.1.mlp.down_proj",
        "model.layers.10.q",
        "model.layers.0.self_attn.o_proj",
    ]
    assert not any(map(find, [*left_out, "model.layers.0.mlp.up_proj", "model.embed.x"]))
    assert all(map(find, ["model.layers.0.mlp.down_proj", "modelXlayers.1.q", "model.layers.0.o_proj_2"]))


def test_modelopts_own_file_says_how_weights_are_quantised_where_config_json_does_not(tmp_path, floats):
    folder = quantise(floats("qwen3"), tmp_path / "packed", PACKERS["modelopt"])
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{x}_proj.{x}_scale": torch.tensor(0.1) for x in "kv"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = []
    for file in ("config.json", "hf_quant_config.json"):
        if file == "hf_quant_config.json":
            edit_json(folder / "config.json", quantization_config=None)
            said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
            (folder / file).write_text(json.dumps({"producer": {}, "quantization": said}))
        with LLM(str(folder), **EXACT, num_kvcache_blocks=40) as llm:
            assert type(llm.model_runner.model.model.layers[0].mlp.down_proj.matrix).__name__ == "Fp8"
            assert llm.config.hf_config.quantization_config["ignore"] == ["lm_head"]
            tokens.append([each["token_ids"] for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)])
    assert tokens[0] == tokens[1]


def test_modelopts_own_file_must_hold_an_object(tmp_path, floats):
    folder = quantise(floats("qwen3"), tmp_path / "packed", PACKERS["modelopt"])
    edit_json(folder / "config.json", quantization_config=None)
    (folder / "hf_quant_config.json").write_text('{"quantization": "FP8"}')
    with pytest.raises(ValueError, match="hf_quant_config.json: quantization must be an object, got 'FP8'"):
        LLM(str(folder), **EXACT)


def test_only_modelopt_has_flat_scales():
    make, shapes = LAYERS["replicated"]
    for name, is_flat in [("modelopt, rows", True), ("float channel", False)]:
        packed = {shard_id: PACKERS[name].pack(torch.randn(shape)) for shard_id, shape in shapes.items()}
        for tensors in packed.values():
            scales = tensors["weight_scale"]
            assert (scales.dim() == 1) == is_flat
            tensors["weight_scale"] = scales[:, None] if is_flat else scales[:, 0]
        with pytest.raises(ValueError, match="shape"):
            load_parts(make_layer(make, PACKERS[name]), packed)


def test_an_engine_that_refuses_a_format_names_the_field(tmp_path, floats):
    folder = quantise(floats("qwen3"), tmp_path / "packed", with_config(PACKERS["gptq"], bits=3))
    with pytest.raises(ValueError, match="quantization_config: bits = 3"):
        LLM(str(folder), **EXACT)


# Made here


@pytest.mark.parametrize("option, error", [("fp8", 2**-4), ("int4", 0.15)])
@pytest.mark.parametrize("size", [1, 2])
def test_weights_are_quantised_while_they_are_loaded(floats, option, error, size):
    folder = floats("qwen2")
    for rank in range(size):
        with use_group(Group(rank, size)):
            layers, plain = linear_layers(load(folder, option)), linear_layers(load(folder))
        for name, layer in layers.items():
            assert type(layer.matrix).__name__.lower() == option
            expected = plain[name].weight
            difference = (matrix_of(layer) - expected).norm() / expected.norm()
            assert 0 < difference < error, name
            assert layer.bias is None or torch.equal(layer.bias, plain[name].bias)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("option", ["fp8", "int4"])
def test_an_engine_of_weights_made_here_answers_as_its_own_matrices_do(
    tmp_path, floats, option, architecture
):
    folder = floats(architecture)
    tensors, layers = load_file(folder / "model.safetensors"), linear_layers(load(folder, option))
    for name, layer in layers.items():
        parent, _, own = name.rpartition(".")
        names = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}.get(
            own, [own]
        )
        if isinstance(layer, StackedLinear):
            names = layer.shards
        sizes = [part.size[0] for part in layer.shards.values()]
        for part, matrix in zip(names, matrix_of(layer).split(sizes), strict=True):
            tensors[f"{parent}.{part}.weight"] = matrix.contiguous()
    reference = tmp_path / "reference"
    reference.mkdir()
    save_file(tensors, reference / "model.safetensors", metadata={"format": "pt"})
    (reference / "config.json").write_text((folder / "config.json").read_text())
    assert_answers_as(folder, reference, quantization=option)


DUMMIES = [
    "nf4",
    "fp8 block",
    "float channel",
    "pack 8, asymmetric",
    "pack 4, asymmetric",
    "gptq, ordered",
    "awq",
]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("name", [*DUMMIES, "option fp8", "option int4"])
def test_dummy_weights_are_quantised_random_matrices(tmp_path, floats, name, architecture):
    if architecture == "qwen3_moe" and "ordered" in name:
        pytest.skip("experts have no orders of inputs")
    folder, option = floats(architecture), None
    if name.startswith("option"):
        option = name.split()[1]
    else:
        folder = quantise(folder, tmp_path / "packed", PACKERS[name])
    first, second = (linear_layers(load(folder, option, "dummy")) for _ in range(2))
    for layer, again in zip(first.values(), second.values(), strict=True):
        matrix = matrix_of(layer)
        assert matrix.std().item() == pytest.approx(0.02, rel=0.1)
        assert torch.equal(matrix, matrix_of(again))
    assert not torch.equal(*(matrix_of(layer) for name, layer in first.items() if "down_proj" in name))


def packed_layers(folder: Path) -> dict[str, LinearBase]:
    model = load(folder)
    pack_weights(model)
    return linear_layers(model)


@pytest.mark.parametrize(
    "name", ["fp8 block", "int group, asymmetric", "gptq, ordered", "modelopt nvfp4", "nf4"]
)
def test_a_cpu_keeps_weights_in_floats_where_it_has_room(tmp_path, monkeypatch, floats, name):
    folder = quantise(floats("qwen3"), tmp_path, PACKERS[name])
    kept = packed_layers(folder)
    monkeypatch.setattr(scaled, "has_room", lambda size: False)
    for key, layer in packed_layers(folder).items():
        if isinstance(layer.matrix, scaled.ScaledWeight):
            assert kept[key].matrix.packed is not None and layer.matrix.packed is None
            out_features, in_features = layer.matrix.shape
            x, bias = torch.randn(3, in_features), torch.randn(out_features)
            found, expected = (each.matrix.multiply(x, bias) for each in (kept[key], layer))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_there_is_room_as_long_as_all_ranks_leave_half_of_the_memory(tmp_path, monkeypatch):
    pages = tmp_path / "statm"
    pages.write_text("900 10 3 1 0 40 0\n")
    monkeypatch.setattr(memory, "OWN_PAGES", pages)
    page = memory.os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(memory, "host_memory", lambda: 100 * page)
    assert memory.has_room(40 * page) and not memory.has_room(40 * page + 1)
    with use_group(Group(1, 2)):
        assert memory.has_room(15 * page) and not memory.has_room(15 * page + 1)
    pages.unlink()
    assert not memory.has_room(1)  # another system than Linux


@pytest.mark.parametrize("name", ["fp8 block", "awq"])
def test_experts_are_kept_in_floats_too(tmp_path, monkeypatch, floats, name):
    folder = quantise(floats("qwen3_moe"), tmp_path, PACKERS[name])
    options = dict(device="cpu", dtype="float32", num_kvcache_blocks=8, max_num_seqs=4)
    answers = []
    for has_room in (True, False):
        monkeypatch.setattr(scaled, "has_room", lambda size, has_room=has_room: has_room)
        with LLM(str(folder), **options) as llm:
            mixture = llm.model_runner.model.model.layers[0].mlp.experts
            assert isinstance(mixture.weights.gate_up, torch.Tensor) is has_room
            answers.append([each["token_ids"] for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)])
    assert answers[0] == answers[1]


def test_the_option_must_name_what_a_quantised_checkpoint_is():
    assert read_scheme(FP8, "fp8").kinds == {"fp8"}
    assert read_scheme(GPTQ, "int4").kinds == {"int4"}
    with pytest.raises(ValueError, match="quantization='int4': the checkpoint is quantised already, as fp8"):
        read_scheme(FP8, "int4")
    with pytest.raises(ValueError, match="quantization='fp8': the checkpoint is quantised already, as int4"):
        read_scheme(AWQ, "fp8")


@pytest.mark.parametrize("config, option", [(GPTQ | {"group_size": 128}, None), (AWQ, None), ({}, "int4")])
def test_int4_weights_may_round_their_inputs_to_8_bits(config, option):
    """Groups of weights that are made here are of as many inputs as that takes."""
    found = read_scheme(config | ROUNDED, option).find("model.layers.0.any").settings
    assert found["rounds_inputs"] and found["stored_tile"] == (1, config.get("group_size", 128))
    assert not read_scheme(config or None, option).find("model.layers.0.any").settings.get("rounds_inputs")


@pytest.mark.parametrize("config, option", [(FP8, None), (NF4, None), ({}, "fp8"), ({}, None)])
def test_inputs_of_other_weights_are_not_rounded(config, option):
    with pytest.raises(ValueError, match="activation_dtype='fp8' is for weights in int4 and experts in MX"):
        read_scheme(config | ROUNDED, option)


def test_inputs_are_rounded_on_hopper_gpus_alone(monkeypatch, tmp_path):
    """There every matrix but the head gets products of 8 bits for more rows than are as fast with 16."""
    sizes = SIZES | dict(hidden_size=256, intermediate_size=384, head_dim=64)
    folder = make_checkpoint(tmp_path / "floats", "qwen3", **sizes)
    with pytest.raises(ValueError, match="activation_dtype='fp8' needs a Hopper GPU"):
        LLM(str(folder), quantization="int4", activation_dtype="fp8", device="cpu")
    monkeypatch.setattr(integers, "can_round_inputs", lambda weight, dtype: weight.group == 128)
    monkeypatch.setattr(products, "can_use_linear_codes", lambda row, weight: True)
    monkeypatch.setattr(products, "library_scales_groups", lambda device: True)
    model = build_model(replace(open_checkpoint(folder).hf_config(), quantization_config=ROUNDED), "int4")
    load_model(model, open_checkpoint(folder))
    # Of 256 inputs, and of 384, which are not permuted in whole pieces for the product of 16 bits.
    layers = {model.model.layers[0].self_attn.qkv_proj: CodesProduct}
    layers[model.model.layers[1].mlp.down_proj] = Int4Product
    for layer, few in layers.items():
        chosen = [type(layer.product(rows)) for rows in (3, 64, 65, 1024, 1025, 10**6)]
        assert chosen == [few] * 2 + [Int4Product] * 2 + [UnpackedInt4Product] * 2
    ordered = quantise(folder, tmp_path / "packed", PACKERS["gptq, ordered"])
    monkeypatch.setattr(integers, "can_round_inputs", lambda weight, dtype: True)
    with pytest.raises(ValueError, match="neighbouring inputs"):
        LLM(str(ordered), activation_dtype="fp8", device="cpu")


@pytest.mark.parametrize("value", ["int8", "", 4, True, ["fp8"]])
def test_an_unknown_quantization_is_refused(value):
    with pytest.raises(ValueError, match="quantization must be one of"):
        ExtendedConfig("model", quantization=value)


# Memory


class Allocations(TorchDispatchMode):
    """Notes the bytes of each tensor that is made."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and func.overloadpacket in NEW:
            self.sizes.append(result.nbytes)
        return result


NEW = {torch.ops.aten.empty, torch.ops.aten.zeros, torch.ops.aten.ones, torch.ops.aten.full}


@pytest.mark.parametrize("option, share", [("fp8", 0.26), ("int4", 0.18)])
def test_no_layer_ever_has_a_weight_of_full_size(floats, option, share):
    config = open_checkpoint(floats("llama")).hf_config()
    with Allocations() as allocations:
        model = build_model(config, option)
    assert sum(allocations.sizes) <= 1.01 * sum(param.nbytes for param in model.parameters())
    for layer in linear_layers(model).values():
        rows, columns = layer.matrix.shape
        assert sum(param.nbytes for param in layer.parameters()) < share * 4 * rows * columns


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it fails
import torch
from nanovllm.distributed.group import Group, use_group
from nanovllm.layers.layernorm import RMSNorm, Stream
from nanovllm.layers.linear import ColumnParallelLinear
from nanovllm.extensions.quantised.assignment import without_weights
from nanovllm.extensions.quantised.formats import read_scheme
from nanovllm.extensions.quantised.kernels.quantised_weight import dequantise_torch
from nanovllm.utils.context import reset_context

reset_context()
x = torch.randn(3, 64)
for option in ("fp8", "int4"):
    with use_group(Group(0, 1)), without_weights():
        layer, norm = ColumnParallelLinear(64, 96), RMSNorm(64)
    format = read_scheme(None, option).find("any")
    layer.set_matrix(format.kind(layer.shards, **format.settings))
    layer.matrix.fill(torch.randn(96, 64))
    expected = norm(x) @ dequantise_torch(layer.matrix.quantised, slice(0, 96), torch.float32).T
    torch.testing.assert_close(layer(Stream(x, norm)), expected)
"""


def test_quantised_weights_need_no_triton():
    child = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
