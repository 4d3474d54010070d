"""Blocks of quantised values: what is decoded here is bit for bit what the gguf package makes of them."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from gguf_packer import FLOATS, as_stored, decode, encode, random_rows

from nanovllm.extensions.quantised import gguf_blocks
from nanovllm.extensions.quantised.gguf_blocks import TYPES, decode_values

CPU = torch.device("cpu")
BYTES, SCALES = (0, 0x5A, 0x7F, 0x80, 0xFF), (0.0, -0.0, 6e-8, 65504.0, -65504.0, np.inf, np.nan)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Which of the many NaN it is does not matter."""
    numbers = ~expected.isnan()
    assert found.dtype == expected.dtype and torch.equal(numbers, ~found.isnan())
    assert torch.equal(found[numbers].view(torch.int32), expected[numbers].view(torch.int32))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("kind", TYPES)
def test_arbitrary_blocks_are_decoded_bit_for_bit(kind, device):
    encoded = random_rows(70, 512, kind)
    assert_same_bits(decode_values(encoded, kind, torch.device(device)).cpu(), decode(encoded, kind))


@pytest.mark.parametrize("kind", TYPES)
def test_extremes_are_decoded_bit_for_bit(kind):
    for byte, scale in itertools.product(BYTES, SCALES):
        blocks = np.full((2, 3, TYPES[kind].bytes), byte, np.uint8)
        for start in FLOATS.get(kind, (0,)):
            blocks[..., start : start + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        encoded = blocks.reshape(2, -1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # inf * 0
            expected = decode(encoded, kind)
        assert_same_bits(decode_values(encoded, kind, CPU), expected)


LOST = {"Q4_K": 0.1, "Q5_K": 0.05, "Q6_K": 0.03, "Q2_K": 0.35, "Q3_K": 0.25, "IQ4_NL": 0.1, "IQ4_XS": 0.1}


@pytest.mark.parametrize("kind", LOST)
def test_the_packers_of_these_tests_keep_values(kind):
    matrix = torch.randn(8, 512, generator=torch.Generator().manual_seed(0))
    lost = (decode(encode(matrix, kind), kind) - matrix).norm() / matrix.norm()
    assert lost < LOST[kind]


@pytest.mark.parametrize("kind", TYPES)
def test_pieces_make_the_whole(kind, monkeypatch):
    encoded = random_rows(200, 256, kind)
    encoded.flags.writeable = False  # as a mapped file is
    monkeypatch.setitem(gguf_blocks.PIECES, "cpu", 1)
    sizes = [len(groups.codes) for groups in gguf_blocks.decode_groups(encoded, kind, CPU)]
    assert sizes == [64, 64, 64, 8]
    assert torch.equal(decode_values(encoded, kind, CPU), decode(encoded, kind))


@pytest.mark.parametrize("shape", [(256,), (3, 4, 256), (0, 256), (3, 0)])
def test_any_number_of_dimensions_and_none_of_rows_can_be_decoded(shape):
    encoded = random_rows(12, 256, "Q5_K")[: shape[0]]
    encoded = np.resize(encoded, (*shape[:-1], encoded.shape[1] * (shape[-1] > 0)))
    assert decode_values(encoded, "Q5_K", CPU).shape == shape


@pytest.mark.parametrize("order", [None, np.random.default_rng(0).permutation(40)])
@pytest.mark.parametrize("kind", TYPES)
def test_a_slice_of_a_tensor_is_that_of_its_values(kind, order):
    encoded = random_rows(40, 768, kind)
    tensor = as_stored(encoded, kind, order=order)
    values = decode(encoded, kind)[slice(None) if order is None else order]
    assert torch.equal(tensor[:], values)
    cuts = (slice(3, 20), slice(16, 700)), (slice(0, 1), slice(250, 260)), (slice(5, 5), slice(0, 9))
    for rows, columns in cuts:
        assert torch.equal(tensor[rows, columns], values[rows, columns])


@pytest.mark.parametrize("columns", [slice(0, 768), slice(32, 288), slice(256, 512), slice(480, 768)])
@pytest.mark.parametrize("kind", TYPES)
def test_a_cut_of_groups_has_their_codes_scales_and_offsets(kind, columns):
    encoded = random_rows(70, 768, kind)
    found = torch.empty(60, columns.stop - columns.start)
    for groups in as_stored(encoded, kind).groups(slice(10, 70), columns):
        assert groups.codes.dtype == (torch.int8 if groups.offsets is None else torch.uint8)
        groups.write(found)
    assert torch.equal(found, decode(encoded, kind)[10:, columns])
