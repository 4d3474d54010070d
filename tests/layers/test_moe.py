"""The mixture of experts as a layer: what it computes, on one rank and on several."""

import pytest
import torch
import torch.nn.functional as F
from test_layers import TP_SIZES, on_rank

from nanovllm import LLM
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.moe import MixtureOfExperts
from nanovllm.layers.residual_stream import Stream
from tiny_checkpoints import EXACT, edit_json, make_checkpoint

HIDDEN, WIDTH, EXPERTS, TOP_K = 12, 8, 5, 2


def make_layer(normalise: bool, weights: dict[str, torch.Tensor]) -> MixtureOfExperts:
    layer = MixtureOfExperts(HIDDEN, WIDTH, EXPERTS, TOP_K, normalise)
    layer.gate.weight.weight_loader(layer.gate.weight, weights["gate.weight"])
    for param in layer.experts.parameters():
        for name, place in param.stored_parts.items():
            param.weight_loader(param, weights[name], place)
    return layer


def mixture(x: torch.Tensor, weights: dict[str, torch.Tensor], normalise: bool) -> torch.Tensor:
    """One token and one expert at a time."""
    out = torch.zeros_like(x)
    for token, row in enumerate(x):
        best, experts = (weights["gate.weight"] @ row).softmax(0).topk(TOP_K)
        for share, expert in zip(best / best.sum() if normalise else best, experts.tolist(), strict=True):
            gate, up, down = (weights[f"{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
            out[token] += share * (down @ (F.silu(gate @ row) * (up @ row)))
    return out


@TP_SIZES
@pytest.mark.parametrize("normalise", [True, False])
def test_the_ranks_parts_add_up_to_the_weighted_sum_of_the_chosen_experts(tp_size, normalise):
    torch.manual_seed(0)
    weights = {"gate.weight": torch.randn(EXPERTS, HIDDEN)}
    for expert in range(EXPERTS):
        for part, shape in (("gate", (WIDTH, HIDDEN)), ("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH))):
            weights[f"{expert}.{part}_proj.weight"] = torch.randn(shape)
    x, norm, next_norm = torch.randn(7, HIDDEN), RMSNorm(HIDDEN), RMSNorm(HIDDEN)
    norm.weight.data.uniform_(0.5, 1.5)
    next_norm.weight.data.uniform_(0.5, 1.5)
    total = torch.zeros(7, HIDDEN)
    for rank in range(tp_size):
        layer = on_rank(rank, tp_size, lambda: make_layer(normalise, weights))
        stream = layer(Stream(x, norm), next_norm)
        assert stream.norm is next_norm
        torch.testing.assert_close(stream.normalised(), next_norm(stream.x))
        total += stream.x - x
    torch.testing.assert_close(total, mixture(norm(x), weights, normalise), atol=1e-5, rtol=1e-5)


def test_experts_that_should_be_quantised_are_refused(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False)
    message = r"experts \(Qwen3MoeForCausalLM\) are not supported"
    with pytest.raises(ValueError, match=f"quantization='int4': quantised weights of {message}"):
        LLM(str(folder), **EXACT, quantization="int4")
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit_json(folder / "config.json", quantization_config=fp8)
    with pytest.raises(ValueError, match=f"quantization_config: quantised weights of {message}"):
        LLM(str(folder), **EXACT)
