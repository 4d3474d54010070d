"""Products of GGUF's types of 4 bits, which stay packed on a CPU that computes in bfloat16."""

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from smollm2 import smollm2_gguf  # noqa: F401  a fixture

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoints.gguf import GGUFTensor
from nanovllm.kernels import runtime
from nanovllm.layers.quantization import read_scheme
from nanovllm.layers.quantization.gguf import GGUF, MANY_ROWS, Converted, PackedCodes, read_blocks
from nanovllm.layers.quantization.scaled import Part
from nanovllm.utils.torch_defaults import torch_defaults
from tiny_checkpoints import one_thread  # noqa: F401

KINDS = ["Q4_0", "Q4_1"]
CPU = torch.device("cpu")


def stored(matrix: torch.Tensor, kind: str) -> tuple[GGUFTensor, torch.Tensor]:
    """The matrix as a file has it, and its values then."""
    type_ = gguf.GGMLQuantizationType[kind]
    encoded = quantize(matrix.numpy(), type_)
    block = gguf.GGML_QUANT_SIZES[type_][0]
    tensor = GGUFTensor("file", "name", tuple(matrix.shape), type_, block, encoded)
    return tensor, torch.from_numpy(dequantize(encoded, type_))


def load(parts: dict[str, Part], tensors: dict[str, GGUFTensor]) -> GGUF:
    with torch_defaults(torch.bfloat16, CPU):
        weight = GGUF(parts)
        for name, tensor in tensors.items():
            weight.stored["weight"].load(tensor, parts[name])
    weight.finish()
    return weight


def assert_multiplies(weight: GGUF, expected: torch.Tensor) -> None:
    """Few rows and many, within the roundings of scales, activations and results."""
    assert weight.dequantise().shape == expected.shape == weight.shape
    largest = expected.abs().max()
    assert (weight.dequantise().float() - expected).abs().max() <= largest * 2**-7
    exact = weight.dequantise().float()
    for rows in (1, 5, MANY_ROWS):
        x, bias = torch.randn(rows, expected.shape[1]).bfloat16(), torch.randn(len(expected)).bfloat16()
        y = x.float() @ exact.t()
        torch.testing.assert_close(weight.multiply(x, None).float(), y, atol=0.15, rtol=2**-7)
        torch.testing.assert_close(weight.multiply(x, bias).float(), y + bias.float(), atol=0.15, rtol=2**-6)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_the_file_s_bit_for_bit(kind):
    tensor, values = stored(torch.randn(64, 96) * torch.logspace(-3, 3, 64)[:, None], kind)
    codes, scales, zeros = read_blocks(tensor.blocks(slice(0, 64), slice(0, 96)), kind)
    blocks = (codes.float() - 8).view(64, 3, 32) * scales[..., None] + zeros[..., None]
    assert torch.equal(blocks.flatten(1), values)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_stays_packed_and_multiplies_as_its_values_do(kind):
    tensor, values = stored(torch.randn(192, 128), kind)
    weight = load({"": Part((192, 128))}, {"": tensor})
    assert [type(product) for product in weight.products] == [PackedCodes]
    assert sum(tensor.nbytes for tensor in weight.parameters.values()) == 192 * 128 * 5 // 8
    assert_multiplies(weight, values)


def test_where_the_layout_of_codes_is_not_known_many_rows_are_multiplied_all_the_same():
    tensor, values = stored(torch.randn(128, 64), "Q4_1")
    weight = load({"": Part((128, 64))}, {"": tensor})
    x = torch.randn(MANY_ROWS, 64).bfloat16()
    assert weight.products[0].is_readable or "AVX512" not in torch.backends.cpu.get_cpu_capability()
    weight.products[0].is_readable = False
    torch.testing.assert_close(weight.multiply(x, None).float(), x.float() @ values.t(), atol=0.3, rtol=0.02)


def test_parts_of_different_types_make_one_weight_whatever_their_order_in_the_file():
    shapes = {"q": (128, "Q4_1"), "k": (64, "Q4_0"), "v": (64, "Q8_0"), "w": (64, "F32"), "z": (64, "Q4_0")}
    parts, tensors, values, offset = {}, {}, [], 0
    for name, (rows, kind) in shapes.items():
        parts[name] = Part((rows, 96), offset=offset)
        tensors[name], value = stored(torch.randn(rows, 96), kind)
        values.append(value)
        offset += rows
    weight = load(parts, dict(reversed(tensors.items())))
    assert [type(product) for product in weight.products] == [PackedCodes, Converted, PackedCodes]
    assert_multiplies(weight, torch.cat(values))


@pytest.mark.parametrize("rows", [slice(64, 128), slice(32, 64)])
@pytest.mark.parametrize("columns", [slice(0, 64), slice(64, 128), slice(48, 96)])
def test_a_rank_has_its_part_also_where_cuts_go_through_blocks(rows, columns):
    tensor, values = stored(torch.randn(128, 128), "Q4_1")
    weight = load({"": Part((128, 128), rows, columns)}, {"": tensor})
    fits = (rows.stop - rows.start) == 64 and columns.start % 32 == 0
    assert [type(product) for product in weight.products] == [PackedCodes if fits else Converted]
    assert_multiplies(weight, values[rows, columns])


@pytest.mark.parametrize("damage", ["shape", "infinite"])
def test_damaged_weights_are_refused(damage):
    tensor, _ = stored(torch.randn(64, 64), "Q4_1")
    if damage == "infinite":
        tensor.encoded[3, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    with pytest.raises(ValueError, match="expected" if damage == "shape" else "infinity"):
        load({"": Part((64, 96) if damage == "shape" else (64, 64))}, {"": tensor})


@pytest.mark.parametrize(
    "dtype, gpu, is_packed",
    [(torch.bfloat16, None, True), (torch.float32, None, False), (torch.bfloat16, "a GPU", False)],
)
def test_weights_are_packed_on_a_cpu_in_bfloat16_only(dtype, gpu, is_packed, monkeypatch):
    monkeypatch.setattr(runtime, "compiling_for", gpu)
    with torch_defaults(dtype, CPU):
        assert (read_scheme({"quant_method": "gguf"}, None).find("any") is not None) == is_packed
        assert read_scheme({"quant_method": "gguf"}, "int4").kinds == {"int4"}


def test_smollm2_answers_with_packed_weights(smollm2_gguf):  # noqa: F811
    with LLM(str(smollm2_gguf), dtype="bfloat16", device="cpu", max_model_len=256) as llm:
        formats = [layer.mlp.down_proj.format for layer in llm.model_runner.model.model.layers]
        assert all(isinstance(format.products[0], PackedCodes) for format in formats)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        result = llm.chat([question], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)[0]
    assert "Paris" in result["text"]
