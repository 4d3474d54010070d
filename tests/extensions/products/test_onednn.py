"""Weights in oneDNN's layout, of linear layers and of LM heads."""

import weakref

import pytest
import torch
from layer_checks import normalised, tolerance

from nanovllm.extensions.products.onednn import PackedHead, pack
from nanovllm.extensions.products.products import FoldingWeight
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.linear import ReplicatedLinear


def make_layer(width, rows, bias=False):
    layer = ReplicatedLinear(width, rows, bias)
    layer.set_matrix(FoldingWeight(layer.shards))
    return layer


BFLOAT16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(
        not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no products in bfloat16 here"
    ),
)


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_weight_multiplies_as_before_and_its_unpacked_copy_is_gone(dtype, rows, bias):
    layer = make_layer(48, 80, bias).to(dtype)
    layer.matrix.weight.data.normal_()
    if bias:
        layer.bias.data.normal_()
    before, weight = weakref.ref(layer.weight), layer.weight.detach().clone()
    x = normalised(torch.randn(rows, 48, dtype=dtype))
    expected = layer(x)
    layer.finish()
    assert layer.weight.is_mkldnn and before() is None
    torch.testing.assert_close(layer(x), expected, **tolerance(dtype))
    torch.testing.assert_close(layer.weight.to_dense(), weight, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_is_packed_and_the_embedding_still_looks_rows_up(dtype):
    embedding, head = VocabParallelEmbedding(40, 16).to(dtype), PackedHead(40, 16).to(dtype)
    embedding.weight.data.normal_()
    head.tie_to(embedding)
    head.is_tied = True
    x = torch.randn(3, 16, dtype=dtype)
    expected, ids = head.logits(x), torch.tensor([0, 39])
    head.finish()
    torch.testing.assert_close(head.logits(x), expected, **tolerance(dtype))
    torch.testing.assert_close(embedding(ids), embedding.weight[ids])
    assert head.weight is embedding.weight


def test_an_untied_head_keeps_its_weight_once():
    head = PackedHead(40, 16)
    head.weight.data.normal_()
    head.finish()
    assert head.weight.is_mkldnn


def test_weights_stay_as_they_are_where_onednn_cannot_multiply_them(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    layer, head = make_layer(16, 16), PackedHead(40, 16)
    for module in (layer, head):
        module.finish()
        assert not module.weight.is_mkldnn


@pytest.mark.skipif(torch.ops.mkldnn._is_mkldnn_fp16_supported(), reason="this CPU computes in float16")
def test_a_warning_says_that_a_cpu_is_slow_in_float16():
    with pytest.warns(UserWarning, match="slow in float16 .*dtype='bfloat16'"):
        assert pack(torch.zeros(4, 4, dtype=torch.float16)) is None
