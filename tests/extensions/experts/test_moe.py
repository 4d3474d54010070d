"""The mixture of experts as a layer: what it computes, on one rank and on several."""

import pytest
import torch
import torch.nn.functional as F
from layer_checks import TP_SIZES, on_rank

from nanovllm import LLM
from nanovllm.extensions.experts import moe
from nanovllm.extensions.experts.config import ExpertsConfig
from nanovllm.extensions.experts.kernels.moe import run_experts_torch
from nanovllm.extensions.experts.moe import MixtureOfExperts
from nanovllm.extensions.quantised import products
from nanovllm.kernels.layernorm import rms_norm_torch
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


def mlp(x: torch.Tensor, weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    gate, up, down = (weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


@TP_SIZES
@pytest.mark.parametrize("kernels", ["gemv", "grouped"])
@pytest.mark.parametrize("has_gate", [True, False])
def test_an_mlp_for_all_tokens_adds_to_what_experts_compute(monkeypatch, tp_size, has_gate, kernels):
    """In one sum over the ranks."""
    torch.manual_seed(0)
    wide, hidden = 4 * WIDTH, HIDDEN
    names = {name: (WIDTH, f"experts.{name}") for name in map(str, range(EXPERTS))}
    shared = "shared_expert" if has_gate else "shared_experts"
    weights = {"gate.weight": torch.randn(EXPERTS, hidden), "shared": torch.randn(1, hidden)}
    for name, (width, _) in (names | {shared: (wide, shared)}).items():
        for part, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
            weights[f"{name}.{part}_proj.weight"] = torch.randn(shape)
    config = ExpertsConfig(
        EXPERTS, TOP_K, WIDTH, shared_expert_intermediate_size=wide, has_shared_gate=has_gate
    )

    def make() -> MixtureOfExperts:
        layer = MixtureOfExperts(hidden, config)
        layer.packed_modules_mapping = {
            "shared_gate": ("gate", "shared"),
            "gate": ("gate", None),
            "gate_proj": ("gate_up_proj", 0),
            "up_proj": ("gate_up_proj", 1),
        }
        if not has_gate:
            del layer.packed_modules_mapping["shared_gate"]
        for name, stored in find_places(layer).items():
            short = "shared" if name == "shared_gate.weight" else name.removeprefix("experts.")
            stored.load(weights[short])
        return layer

    if kernels == "gemv":
        monkeypatch.setattr(moe, "choose_kernels", lambda *_: moe.Gemv(None, None))
        monkeypatch.setattr(moe, "run_gemv", plain_gemv)
    x, norm, next_norm = torch.randn(7, hidden), RMSNorm(hidden), RMSNorm(hidden)
    norm.weight.data.uniform_(0.5, 1.5)
    total, num_sums = torch.zeros(7, hidden), []
    monkeypatch.setattr(next_norm, "forward", lambda y, residual: num_sums.append(y) or (y, y + residual))
    for rank in range(tp_size):
        layer = on_rank(rank, tp_size, make)
        total += layer(Stream(x, norm), next_norm).residual() - x
    assert tp_size == 1 or len(num_sums) == tp_size
    normed = norm(x)
    expected = mlp(normed, weights, shared)
    if has_gate:
        expected = expected * torch.sigmoid(normed @ weights["shared"].T)
    expected += mixture(normed, weights, True)
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-4)


def plain_gemv(_kernels, x, weights, chosen, norm_weight, eps, before):
    """As `run_gemv` on a GPU."""
    x = x if norm_weight is None else rms_norm_torch(x, norm_weight, eps)
    y = run_experts_torch(x, weights, chosen).sum(1)
    return y if before is None else y + before


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
