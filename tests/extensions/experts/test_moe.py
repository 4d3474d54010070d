"""The mixture of experts as a layer: what it computes, on one rank and on several."""

import pytest
import torch
import torch.nn.functional as F
from layer_checks import TP_SIZES, on_rank

from nanovllm import LLM
from nanovllm.extensions.experts.config import ExpertsConfig
from nanovllm.extensions.experts.moe import MixtureOfExperts
from nanovllm.extensions.quantised import products
from nanovllm.layers.layernorm import RMSNorm, Stream
from nanovllm.utils.loader import find_places
from tiny_checkpoints import EXACT, edit_json, make_checkpoint

HIDDEN, WIDTH, EXPERTS, TOP_K = 12, 8, 5, 2


def make_layer(normalise: bool, weights: dict[str, torch.Tensor]) -> MixtureOfExperts:
    layer = MixtureOfExperts(HIDDEN, ExpertsConfig(EXPERTS, TOP_K, WIDTH, normalise))
    for name, stored in find_places(layer).items():
        stored.load(weights[name.removeprefix("experts.")])
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
        torch.testing.assert_close(stream.normalised(), next_norm(stream.residual()))
        total += stream.residual() - x
    torch.testing.assert_close(total, mixture(norm(x), weights, normalise), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("group", [0, 128])
def test_what_experts_add_is_summed_and_normalised_together_with_its_rounding_to_8_bits(monkeypatch, group):
    torch.manual_seed(0)
    layer = MixtureOfExperts(128, ExpertsConfig(4, 2, 8))
    for param in layer.parameters():
        param.data.normal_(0, 0.1)
    x, norm, next_norm = torch.randn(7, 128), RMSNorm(128), RMSNorm(128)
    expected = layer(Stream(x, norm), next_norm)
    normed = expected.normalised()
    stream = layer(Stream(x, norm), next_norm)
    monkeypatch.setattr(products, "quantise", None)  # the one that finds its rows already normalised
    rows = products.quantised_rows(stream, group)
    assert torch.equal(stream.x, expected.x) and not torch.equal(stream.x, x)
    scales = rows.scales[:7, None] if group == 0 else rows.scales[0, :7, None]
    assert (rows.codes[:7].float() * scales - normed).norm() < 2**-4 * normed.norm()


def test_a_format_that_experts_cannot_have_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    edit_json(folder / "config.json", quantization_config=config)
    message = "quantised weights of experts with inputs in an order of their own are not supported"
    with pytest.raises(ValueError, match=message):
        LLM(str(folder), **EXACT | {"dtype": "bfloat16"})
