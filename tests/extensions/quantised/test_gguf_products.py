"""Products of GGUF's types, which stay packed on a CPU that computes in bfloat16."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf_packer import as_stored, decode, encode, random_rows
from smollm2 import smollm2_gguf  # noqa: F401  a fixture

from nanovllm import LLM, SamplingParams
from nanovllm.extensions.checkpoints.gguf_file import GGUFTensor
from nanovllm.extensions.products import onednn
from nanovllm.extensions.quantised import gguf, memory
from nanovllm.extensions.quantised.formats import read_scheme
from nanovllm.extensions.quantised.gguf import (
    BITS,
    GGUF,
    MANY_ROWS,
    SOME_ROWS,
    Converted,
    KernelCodes,
    PackedCodes,
    join,
    pack_for_kernels,
)
from nanovllm.extensions.quantised.kernels.quantised_matvec import matvec_of_parts, quantised_matvec
from nanovllm.extensions.quantised.kernels.quantised_weight import dequantise
from nanovllm.extensions.quantised.scaled import multiply_by_kernels
from nanovllm.kernels import runtime
from nanovllm.layers.linear import Shard
from nanovllm.utils.torch_defaults import torch_defaults
from tiny_checkpoints import one_thread  # noqa: F401

CPU = torch.device("cpu")


def stored(matrix: torch.Tensor, kind: str) -> tuple[GGUFTensor, torch.Tensor]:
    """The matrix as a file has it, and its values then."""
    encoded = encode(matrix, kind)
    return as_stored(encoded, kind), decode(encoded, kind)


def load(parts: dict[str, Shard], tensors: dict[str, GGUFTensor], **settings: Any) -> GGUF:
    with torch_defaults(torch.bfloat16, CPU):
        weight = GGUF(parts, **settings)
        weight.library = onednn
        for name, tensor in tensors.items():
            weight.stored["weight"].load(tensor, parts[name])
    weight.finish()
    return weight


def matrix_of(run: PackedCodes | KernelCodes | Converted) -> torch.Tensor:
    """What some rows of a weight are multiplied by."""
    if isinstance(run, PackedCodes):
        return run.dequantise()
    if isinstance(run, KernelCodes):
        return dequantise(run.weight, torch.float32)
    return run.weight.to_dense() if run.weight.is_mkldnn else run.weight


def whole(weight: GGUF) -> torch.Tensor:
    return torch.cat([matrix_of(run) for run in weight.runs])


def assert_multiplies(weight: GGUF, expected: torch.Tensor) -> None:
    """Few rows and many, within the roundings of scales, activations and results."""
    assert whole(weight).shape == expected.shape == weight.shape
    largest = expected.abs().max()
    assert (whole(weight).float() - expected).abs().max() <= largest * 2**-7
    exact = whole(weight).float()
    for rows in (1, 5, MANY_ROWS[2], MANY_ROWS[1]):
        x, bias = torch.randn(rows, expected.shape[1]).bfloat16(), torch.randn(len(expected)).bfloat16()
        y = x.float() @ exact.t()
        torch.testing.assert_close(weight.multiply(x, None).float(), y, atol=0.15, rtol=2**-7)
        torch.testing.assert_close(weight.multiply(x, bias).float(), y + bias.float(), atol=0.15, rtol=2**-6)


@pytest.mark.parametrize("kind", BITS)
def test_a_weight_stays_packed_and_multiplies_as_its_values_do(kind):
    tensor, values = stored(torch.randn(192, 256), kind)
    weight = load({"": Shard((192, 256))}, {"": tensor})
    assert [type(product) for product in weight.runs] == [PackedCodes]
    group = 16 if kind in ("Q2_K", "Q3_K", "Q6_K") else 32
    bits = (4 if BITS[kind] == 4 else 8) + 32 / group  # codes, and two numbers a group
    assert sum(tensor.nbytes for tensor in weight.parameters.values()) == 192 * 256 * bits / 8
    assert_multiplies(weight, values)


needs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no products in bfloat16 for this CPU"
)


@needs_bf16
@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_a_weight_kept_beside_its_codes_multiplies_what_is_more_than_some_rows(kind, monkeypatch):
    tensor, values = stored(torch.randn(192, 256), kind)
    weight = load({"": Shard((192, 256))}, {"": tensor}, keeps_weight=True)
    packed_alone = load({"": Shard((192, 256))}, {"": tensor})
    assert len(weight.parameters) == len(packed_alone.parameters) + 1
    assert_multiplies(weight, values)
    [product] = weight.runs
    assert torch.equal(product.weight.to_dense(), product.dequantise())
    rows, used = SOME_ROWS[product.digits], []
    multiply = onednn.multiply
    monkeypatch.setattr(onednn, "multiply", lambda x, weight: used.append(len(x)) or multiply(x, weight))
    for count in (rows - 1, rows, MANY_ROWS[1]):
        weight.multiply(torch.randn(count, 256).bfloat16(), None)
    assert used == [rows, MANY_ROWS[1]]


def test_weights_are_kept_beside_codes_where_half_of_the_memory_holds_both(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CONTAINER_LIMIT", limit)
    physical = memory.host_memory()
    assert physical > 2**28
    for written, expected in [("max\n", None), ("8000\n", 8000), (f"{2**62}\n", None)]:
        limit.write_text(written)
        assert memory.host_memory() == (expected or physical)
    limit.write_text("8000")
    with torch_defaults(torch.bfloat16, CPU):
        for num_weights, keeps in [(1000, True), (1001, False)]:
            scheme = read_scheme({"quant_method": "gguf", "num_weights": num_weights}, None)
            assert scheme.find("any").settings == {"keeps_weight": keeps}
        monkeypatch.setattr(runtime, "compiling_for", "a GPU")
        scheme = read_scheme({"quant_method": "gguf", "num_weights": 1}, None)
        assert scheme.formats[0].settings == {"keeps_weight": False}
    monkeypatch.delattr("os.sysconf")
    assert memory.host_memory() == 0


def test_one_row_is_multiplied_by_a_gemv_also_where_parts_have_different_types(monkeypatch):
    """On a GPU, unless one of them is not packed."""
    monkeypatch.setattr(runtime, "compiling_for", SimpleNamespace(major=9, minor=0))
    monkeypatch.setattr(runtime, "TRITON_DEVICES", {"cpu"})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with torch_defaults(torch.bfloat16, CPU):
        weight = GGUF({"": Shard((64, 256))})
    weight.make_gemv = lambda multiply: multiply
    whole = slice(None), slice(None)
    [first], [second] = (
        join(
            pack_for_kernels(each, kind)
            for each in as_stored(random_rows(64, 256, kind), kind).groups(*whole)
        )
        for kind in ("Q4_K", "Q6_K")
    )
    for weight.runs, expected in [
        ([first], [quantised_matvec]),
        ([first, second], [matvec_of_parts]),
        ([first, Converted((None,), torch.zeros(64, 256))], []),
    ]:
        found = weight.products(SimpleNamespace(hidden_size=256))
        assert [getattr(each, "func", None) for each in found][: len(expected)] == expected
        assert len(found) == len(expected) + (len(weight.runs) == 1)


@pytest.mark.parametrize("kind", BITS)
def test_every_code_comes_back_within_a_rounding_of_its_scale_and_zero(kind):
    encoded = random_rows(128, 512, kind)
    expected = decode(encoded, kind)
    weight = load({"": Shard((128, 512))}, {"": as_stored(encoded, kind)})
    lost = (whole(weight).float() - expected).norm() / expected.norm()
    assert lost < 1.8 * (expected.bfloat16().float() - expected).norm() / expected.norm()
    x = torch.eye(512).bfloat16()
    assert len(x) > MANY_ROWS[1]
    one_by_one = torch.cat([weight.multiply(row[None], None) for row in x]).t().float()
    assert (one_by_one - expected).norm() / expected.norm() < 0.004
    torch.testing.assert_close(weight.multiply(x, None).t(), whole(weight), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_where_the_layout_of_codes_is_not_known_many_rows_are_multiplied_all_the_same(kind, monkeypatch):
    tensor, values = stored(torch.randn(128, 64), kind)
    weight = load({"": Shard((128, 64))}, {"": tensor})
    x = torch.randn(MANY_ROWS[1], 64).bfloat16()
    assert gguf.is_readable() or "AVX512" not in torch.backends.cpu.get_cpu_capability()
    monkeypatch.setattr(gguf, "is_readable", lambda: False)
    torch.testing.assert_close(weight.multiply(x, None).float(), x.float() @ values.t(), atol=0.3, rtol=0.02)


def test_parts_of_different_types_make_one_weight_whatever_their_order_in_the_file():
    kinds = ["Q4_1", "Q4_0", "Q4_K", "Q8_0", "Q5_K", "Q5_0", "F32", "Q6_K", "Q5_1"]
    parts, tensors, values, offset = {}, {}, [], 0
    for name, (rows, kind) in enumerate(zip([128, *[64] * 8], kinds, strict=True)):
        parts[name] = Shard((rows, 256))
        parts[name].place = slice(offset, offset + rows)
        tensors[name], value = stored(torch.randn(rows, 256), kind)
        values.append(value)
        offset += rows
    weight = load(parts, dict(reversed(tensors.items())))
    assert [type(product) for product in weight.runs] == [
        PackedCodes, PackedCodes, Converted, PackedCodes, PackedCodes
    ]  # fmt: skip
    assert [len(matrix_of(product)) for product in weight.runs] == [256, 192, 64, 64, 64]
    assert_multiplies(weight, torch.cat(values))


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("rows", [slice(64, 128), slice(32, 64)])
@pytest.mark.parametrize("columns", [slice(0, 64), slice(64, 512), slice(48, 96)])
def test_a_rank_has_its_part_also_where_cuts_go_through_blocks(kind, rows, columns):
    tensor, values = stored(torch.randn(128, 512), kind)
    tensor = replace(tensor, order=np.arange(128)[::-1].copy())
    values = values.flip(0)
    weight = load({"": Shard((128, 512), rows, columns)}, {"": tensor})
    fits = (rows.stop - rows.start) == 64 and columns.start % 32 == 0
    assert [type(product) for product in weight.runs] == [PackedCodes if fits else Converted]
    assert_multiplies(weight, values[rows, columns])


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "Q8_0", "Q6_K"])
@pytest.mark.parametrize("damage", ["shape", "infinite"])
def test_damaged_weights_are_refused(kind, damage):
    tensor, _ = stored(torch.randn(64, 256), kind)
    if damage == "infinite":
        start = 208 if kind == "Q6_K" else 0
        tensor.encoded[3, start : start + 2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    with pytest.raises(ValueError, match="expected" if damage == "shape" else "infinity"):
        load({"": Shard((64, 512) if damage == "shape" else (64, 256))}, {"": tensor})


@pytest.mark.parametrize(
    "dtype, gpu, has_triton, is_packed",
    [
        (torch.bfloat16, None, False, True),
        (torch.float16, None, True, False),
        (torch.float32, None, True, False),
        (torch.bfloat16, "a GPU", True, True),
        (torch.float16, "a GPU", True, True),
        (torch.float32, "a GPU", True, False),
        (torch.bfloat16, "a GPU", False, False),
    ],
)
def test_weights_are_packed_in_bfloat16_and_on_gpus_in_float16(
    dtype, gpu, has_triton, is_packed, monkeypatch
):
    monkeypatch.setattr(runtime, "compiling_for", gpu)
    monkeypatch.setattr(runtime, "HAVE_TRITON", has_triton)
    with torch_defaults(dtype, CPU):
        assert (read_scheme({"quant_method": "gguf"}, None).find("any") is not None) == is_packed
        assert read_scheme({"quant_method": "gguf"}, "int4").kinds == {"int4"}


@pytest.mark.parametrize("kind", BITS)
def test_what_gpu_kernels_read_is_bit_for_bit_what_the_file_means(kind):
    """
    q and k of one type are one product, also where rows are 0, and v of another a second. Here the kernels'
    twins compute.
    """
    kinds = {"q": kind, "k": kind, "v": "Q4_1" if kind != "Q4_1" else "Q8_0"}
    encoded = {name: random_rows(64, 512, kind) for name, kind in kinds.items()}
    encoded["k"][:] = encode(torch.zeros(64, 512), kind)
    pieces = [
        pack_for_kernels(groups, kinds[name])
        for name, rows in encoded.items()
        for groups in as_stored(rows, kinds[name]).groups(slice(0, 64), slice(0, 512))
    ]
    products = join(pieces)
    assert [product.weight.shape for product in products] == [(128, 512), (64, 512)]
    got = torch.cat([matrix_of(product) for product in products])
    assert torch.equal(got, torch.cat([decode(rows, kinds[name]) for name, rows in encoded.items()]))
    x = torch.randn(3, 512)
    y = torch.cat([multiply_by_kernels(x, product.weight, None) for product in products], dim=-1)
    torch.testing.assert_close(y, x @ got.T, rtol=1e-4, atol=1e-4 * (x @ got.T).abs().max().item())


def test_smollm2_answers_with_packed_weights(smollm2_gguf):  # noqa: F811
    with LLM(str(smollm2_gguf), dtype="bfloat16", device="cpu", max_model_len=256) as llm:
        formats = [layer.mlp.down_proj.matrix for layer in llm.model_runner.model.model.layers]
        assert all(isinstance(format.runs[0], PackedCodes) for format in formats)
        # Its answer begins with a token that is twice as likely as the next one: rounding differs by CPU.
        question = [{"role": "user", "content": "Name the capital of Italy."}]
        result = llm.chat([question], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)[0]
    assert "Rome" in result["text"]
