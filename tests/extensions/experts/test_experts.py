"""The kernels of a mixture of experts against their torch twins, and these against plain arithmetic.

As in test_kernels.py, the Triton kernels run through Triton's interpreter in a child process, and on a GPU.
"""

import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import (
    DEVICES,
    HALF,
    assert_passes_in_the_interpreter,
    error,
    in_both_types,
    on,
    on_devices,
    rand,
    tolerance,
)
from quantised_weights import FORMATS, in_order, make_weight

from nanovllm.extensions.experts.config import ExpertsConfig
from nanovllm.extensions.experts.kernels import moe, router
from nanovllm.extensions.experts.kernels.experts import ExpertWeights, activate_torch
from nanovllm.extensions.experts.kernels.router import max_tiles, sort_assignments
from nanovllm.extensions.experts.moe import MixtureOfExperts
from nanovllm.extensions.quantised.kernels import fp8_linear, grouped_fp8, quantised_matvec
from nanovllm.extensions.quantised.kernels.grouped_gemm import GroupedProduct, Tile
from nanovllm.extensions.quantised.kernels.quantised_weight import (
    QuantisedWeight,
    dequantise_torch,
    in_bricks,
    pack,
)
from nanovllm.kernels.layernorm import rms_norm_torch
from nanovllm.kernels.runtime import HAVE_TRITON, INTERPRETED, arrival_counters
from nanovllm.layers.layernorm import RMSNorm, Stream
from nanovllm.utils.context import reset_context, set_context

EPS = 0.01  # large enough to be missed where it is left out
NAN = float("nan")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or not HAVE_TRITON, reason="this is the child process, or Triton is missing")
def test_the_kernels_agree_with_their_twins_in_tritons_interpreter():
    assert_passes_in_the_interpreter(__file__)


def make_experts(num_experts, hidden, width, device, dtype):
    gate_up = rand(num_experts, 2 * width, hidden, device=device) * hidden**-0.5
    down = rand(num_experts, hidden, width, device=device) * width**-0.5
    matrices = gate_up.to(dtype).flatten(0, 1), down.to(dtype).flatten(0, 1)
    return ExpertWeights(*matrices, num_experts)


def choose(rows, top_k, num_experts, device, allowed=None):
    """Different experts for each row, of those that are allowed, with random weights."""
    allowed = range(num_experts) if allowed is None else allowed
    orders = torch.stack([torch.randperm(len(allowed))[:top_k] for _ in range(rows)])
    experts = torch.tensor(list(allowed), dtype=torch.int32)[orders].to(device)
    return router.Chosen(experts, torch.rand(rows, top_k).to(device))


def plain_mixture(x, weights, chosen):
    """In double precision, one pair at a time."""
    x = x.double()
    gate_up, down = (each.double().unflatten(0, (weights.num_experts, -1)) for each in weights[:2])
    out = torch.zeros_like(x)
    for row, (experts, weights) in enumerate(zip(*map(torch.Tensor.tolist, chosen), strict=True)):
        for expert, weight in zip(experts, weights, strict=True):
            gate, up = (gate_up[expert] @ x[row]).chunk(2)
            out[row] += weight * (down[expert] @ (F.silu(gate) * up))
    return out


def run_grouped(x, weights, chosen, is_prefill=True):
    """By the grouped GEMM, however few rows there are."""
    kernels = moe.choose_kernels(x, weights, True)
    return moe.run_grouped(kernels, x, weights, chosen, is_prefill)


# The choice of experts


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("top_k", range(1, 9))
def test_the_chosen_experts_are_those_with_the_highest_probabilities(top_k, normalise):
    logits = rand(30, 11)
    experts, weights = router.choose_experts_torch(logits, top_k, normalise)
    best, indices = logits.softmax(-1).topk(top_k)
    assert torch.equal(experts.long(), indices) and experts.dtype == torch.int32
    torch.testing.assert_close(weights, best / best.sum(-1, keepdim=True) if normalise else best)


def test_of_equal_experts_the_first_are_chosen():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [2.0] * 5, [0.0, -1.0, 0.0, -1.0, -1.0]])
    experts, weights = router.choose_experts_torch(logits, 3, True)
    assert experts.tolist() == [[1, 2, 4], [0, 1, 2], [0, 2, 1]]
    torch.testing.assert_close(weights[:2], torch.full((2, 3), 1 / 3))


@on_devices
@in_both_types
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("num_experts", [11, 128])
def test_the_choice_matches_its_twin(device, dtype, normalise, num_experts):
    for rows in on(device, (1, 2, 3, 4, 5, 40, 500), (1, 6)):
        for top_k in on(device, range(1, 9), (1, 2, 7, 8)):
            # Few different logits, so that there are many ties; of rows that are parts of longer ones.
            logits = torch.randint(-3, 4, (rows, 2 * num_experts), device=device).to(dtype)[:, :num_experts]
            logits = logits if top_k % 2 else logits + rand(rows, num_experts, device=device, dtype=dtype)
            got = router.choose_experts(logits, top_k, normalise)
            expected = router.choose_experts_torch(logits, top_k, normalise)
            assert torch.equal(got.experts, expected.experts)
            assert got.experts.dtype == torch.int32 and got.weights.dtype == torch.float32
            torch.testing.assert_close(got.weights, expected.weights)


@on_devices
@in_both_types
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("num_experts", [12, 160])
def test_the_choice_by_sigmoids_matches_its_twin(device, dtype, normalise, num_experts):
    for rows in on(device, (1, 2, 3, 4, 5, 40, 500), (1, 6)):
        for top_k in on(device, range(1, 9), (1, 2, 7, 8)):
            logits = rand(rows, 2 * num_experts, device=device, dtype=dtype)[:, :num_experts] * 2
            for groups, has_bias in ((1, False), (1, True), (4, True)):
                bias = rand(num_experts, device=device) if has_bias else None
                rule = router.SigmoidRule(bias, groups, (groups + 1) // 2, 1.0 + groups)
                if top_k > num_experts // groups * rule.top_groups:
                    continue
                got = router.choose_experts(logits, top_k, normalise, rule)
                expected = router.choose_experts_torch(logits, top_k, normalise, rule)
                assert torch.equal(got.experts, expected.experts)
                assert got.experts.dtype == torch.int32 and got.weights.dtype == torch.float32
                torch.testing.assert_close(got.weights, expected.weights)


@on_devices
@pytest.mark.parametrize("kind", ["softmax", "sigmoids", "sigmoids without a bias"])
@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_whatever_the_logits_a_token_gets_different_experts_that_exist(device, value, kind):
    logits = rand(5, 6, device=device)
    logits[1], logits[2, 1:], logits[3, ::2] = value, value, value
    bias = rand(6, device=device) if kind == "sigmoids" else None
    rule = None if kind == "softmax" else router.SigmoidRule(bias)
    experts = router.choose_experts(logits, 5, True, rule).experts
    for row in experts.tolist():
        assert len(set(row)) == 5 and set(row) <= set(range(6))


GROUPS = dict(n_group=4, topk_group=2, routed_scaling_factor=2.5)
# transformers' routers: name of the model and the class, its settings, and whether it normalises.
ROUTERS = {
    "softmax": ("mixtral", "MixtralTopKRouter", {}, True),
    "softmax, not normalised": ("olmoe", "OlmoeTopKRouter", {"norm_topk_prob": False}, False),
    "softmax of the chosen": ("gpt_oss", "GptOssTopKRouter", {}, True),
    "sigmoids": ("glm4_moe", "Glm4MoeTopkRouter", GROUPS | {"norm_topk_prob": True}, True),
    "sigmoids, not normalised": ("glm4_moe", "Glm4MoeTopkRouter", GROUPS | {"norm_topk_prob": False}, False),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_experts_are_chosen_as_by_transformers_routers(name):
    family, kind, settings, normalise = ROUTERS[name]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    sizes = dict(num_experts_per_tok=3, num_experts=16, num_local_experts=16, hidden_size=24)
    theirs = getattr(module, kind)(SimpleNamespace(**sizes, **settings)).float()
    for value in (*theirs.parameters(), *theirs.buffers()):
        value.data.normal_()
    logits, weights, experts = theirs(torch.randn(50, 24))
    rule = None
    if "sigmoids" in name:
        rule = router.SigmoidRule(theirs.e_score_correction_bias, *GROUPS.values())
    got = router.choose_experts_torch(logits, 3, normalise, rule)
    dense = [torch.zeros(50, 16, dtype=torch.float32) for _ in range(2)]
    dense[0].scatter_(1, got.experts.long(), got.weights)
    dense[1].scatter_(1, experts, weights.detach().float())
    torch.testing.assert_close(*dense)
    if "chosen" not in name and rule is None:  # else theirs are in no order
        assert torch.equal(got.experts.long(), experts)


# The experts' products

SIZES = [(8, 40, 16), (5, 72, 20), (3, 24, 70)]  # experts, hidden, width


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_experts, hidden, width", SIZES)
def test_the_twin_does_plain_arithmetic(monkeypatch, dtype, num_experts, hidden, width):
    monkeypatch.setattr(moe, "use_triton", lambda tensor: False)
    weights = make_experts(num_experts, hidden, width, "cpu", dtype)
    x, chosen = rand(7, hidden, dtype=dtype), choose(7, 2, num_experts, "cpu")
    got = run_grouped(x, weights, chosen)
    assert got.dtype == dtype and error(got.sum(1), plain_mixture(x, weights, chosen)) < tolerance(dtype)


@on_devices
@in_both_types
@pytest.mark.parametrize("num_experts, hidden, width", SIZES)
def test_a_few_rows_match_plain_arithmetic(device, dtype, num_experts, hidden, width):
    if device == "cpu" and num_experts != 5:
        pytest.skip("takes long in the interpreter")
    weights = make_experts(num_experts, hidden, width, device, dtype)
    norm_weight = (1 + rand(hidden, device=device) / 4).to(dtype)
    for rows in on(device, (1, 2, 3, 4), (2,)):
        x, residual = (rand(rows, 2 * hidden, device=device, dtype=dtype)[:, :hidden] for _ in range(2))
        for top_k in on(device, range(1, num_experts + 1), (3,)):
            chosen = choose(rows, top_k, num_experts, device)
            got = moe.run_gemv(moe.GEMV, x, weights, chosen)
            assert got.dtype == dtype and got.shape == (rows, hidden)
            assert error(got, plain_mixture(x, weights, chosen)) < tolerance(dtype)
            got = moe.run_gemv(moe.GEMV, x, weights, chosen, norm_weight, EPS, residual)
            wide = x.double()
            normed = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * norm_weight.double()
            assert error(got, plain_mixture(normed, weights, chosen) + residual) < tolerance(dtype)


@on_devices
@pytest.mark.parametrize("hidden, width", [(1030, 2), (4, 270)])
def test_a_few_long_rows_match_plain_arithmetic(device, hidden, width):
    weights, x = make_experts(2, hidden, width, device, HALF), rand(1, hidden, device=device, dtype=HALF)
    chosen = choose(1, 1, 2, device)
    got = moe.run_gemv(moe.GEMV, x, weights, chosen)
    assert error(got, plain_mixture(x, weights, chosen)) < tolerance(HALF)


def group_cases(device):
    """rows, top_k, experts, and which of them are chosen: all, one, some that are not neighbours."""
    yield from [(1, 1, 8, None), (40, 1, 8, [5]), (33, 2, 11, [1, 6, 7]), (17, 8, 8, None), (5, 3, 128, None)]
    yield (300, 4, 5, None)  # several programs count, and experts have several tiles
    if device == "cuda":
        yield from [(512, 8, 128, None), (512, 8, 128, [*range(0, 128, 16)]), (4000, 8, 64, None)]


@pytest.mark.parametrize("device", DEVICES)
def test_pairs_are_grouped_by_expert_and_the_counters_are_clear_again(device):
    for rows, top_k, num_experts, allowed in group_cases(device):
        experts = choose(rows, top_k, num_experts, device, allowed).experts
        for block in (16, 64):
            groups = sort_assignments(experts, num_experts, block)
            counts = torch.bincount(experts.flatten(), minlength=num_experts)
            ends = ((counts + block - 1) // block).cumsum(0)
            assert torch.equal(groups.table, torch.stack([counts, ends]).int())
            assert ends[-1] <= groups.max_tiles
            for expert, count in enumerate(counts.tolist()):
                expected = (experts.flatten() == expert).nonzero().flatten()
                assert torch.equal(groups.assignments[expert, :count].long().sort().values, expected)
            assert not arrival_counters(experts.device).any()


@pytest.mark.parametrize("rows, top_k, num_experts", [(1, 8, 128), (16, 8, 128), (64, 2, 4), (1, 1, 1)])
def test_there_are_no_more_tiles_than_pairs_and_experts_can_need(rows, top_k, num_experts):
    pairs = rows * top_k
    for block in (16, 64):
        worst = min(pairs, num_experts) - 1  # experts with one pair each, and one that has the rest
        needed = worst + -(-min(rows, pairs - worst) // block)
        assert needed <= max_tiles(pairs, num_experts, block) <= pairs


@on_devices
@in_both_types
@pytest.mark.parametrize("is_prefill", [True, False])
@pytest.mark.parametrize("num_experts, hidden, width", SIZES)
def test_grouped_rows_match_plain_arithmetic(device, dtype, is_prefill, num_experts, hidden, width):
    weights = make_experts(num_experts, hidden, width, device, dtype)
    cases = [(7, 3, None), (40, 1, [1]), (40, 2, [0, 2])]  # rows, top_k, experts that are chosen
    cases += on(device, [(1, 1, None), (300, 2, None), (40, num_experts, None)], [])
    for rows, top_k, allowed in cases:
        x = rand(rows, 2 * hidden, device=device, dtype=dtype)[:, :hidden]
        chosen = choose(rows, top_k, num_experts, device, allowed)
        got = run_grouped(x, weights, chosen, is_prefill)
        assert got.dtype == dtype and got.shape == (rows, top_k, hidden)
        assert error(got.sum(1), plain_mixture(x, weights, chosen)) < tolerance(dtype)


# Weights of few bits

QUANTISED_SIZES = [(8, 512, 384), (6, 352, 96), (16, 2048, 768)]  # experts, hidden, width
ON_A_CPU = {  # formats, and whether there are biases
    "fp8, a scale a row": False,
    "fp8, blocks": False,
    "int8, a zero a row": True,
    "int8, groups of 32 with offsets": False,
    "int4, groups of 32": False,
    "int4, groups of 64 with zeros": False,
    "nf4": False,
    "fp4, groups of 16": True,
    "mxfp4": True,
    "mxfp4 in bricks": False,
    "int4, groups of 32 with offsets; int8, groups of 16": False,
}
# One format, or that of the first product's weights and that of the second's.
QUANTISED = [*FORMATS, *(name for name in ON_A_CPU if name not in FORMATS)]
QUANTISED += ["int8, groups of 16; int4, groups of 32 with offsets"]


def make_quantised(name, num_experts, rows, width, device):
    shape = num_experts * rows, width
    if not name.startswith("mxfp4"):
        return make_weight(name, shape, device, rows)
    codes = pack(torch.randint(16, shape, dtype=torch.uint8)).to(device)
    scales = torch.randint(110, 122, (shape[0], -(-width // 32)), dtype=torch.uint8, device=device)
    weight = QuantisedWeight(codes, shape, scales.view(torch.float8_e8m0fnu), (1, 32))
    return in_bricks(weight) if name == "mxfp4 in bricks" else weight


def make_quantised_experts(name, num_experts, hidden, width, device, has_bias):
    first, _, second = name.partition("; ")
    gate_up = make_quantised(first, num_experts, 2 * width, hidden, device)
    down = make_quantised(second or first, num_experts, hidden, width, device)
    biases = [rand(each.shape[0], device=device) * has_bias for each in (gate_up, down)]
    return ExpertWeights(gate_up, down, num_experts, *(biases if has_bias else [None, None]), has_bias)


def skip_unless_hopper(device):
    if device == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for Hopper GPUs")


def skip_most_on_a_cpu(device, name, has_bias):
    if "bricks" in name:
        skip_unless_hopper(device)
    if device == "cpu" and (name not in ON_A_CPU or has_bias != ON_A_CPU[name]):
        pytest.skip("takes long in the interpreter")


def in_rows(weight):
    """What became bricks."""
    if not weight.is_in_bricks:
        return weight
    codes, scales = (
        each.transpose(1, 2).flatten(2).flatten(0, 1)[:, : weight.shape[1] // values]
        for each, values in ((weight.codes, 2), (weight.readable_scales, 32))
    )
    return weight._replace(codes=codes, scales=scales.contiguous().view(weight.scales.dtype), largest=None)


def in_floats(weights):
    """Weights that are to mean the same."""
    matrices = (
        dequantise_torch(in_rows(each), slice(0, each.shape[0]), torch.float64).to(each.codes.device)
        for each in weights[:2]
    )  # fmt: skip
    return ExpertWeights(*matrices, *weights[2:])


def as_quantised(x, group):
    rows = fp8_linear.quantise_torch(x, group)
    codes, scales = rows.codes[: len(x)].double(), rows.scales[..., : len(x)].double()
    if not group:
        return codes * scales[:, None]
    return (codes.unflatten(1, (-1, group)) * scales.T[..., None]).flatten(1)


def rounded_mixture(x, weights, chosen, rounded=as_quantised):
    """As `exact_mixture`, with the inputs of both products rounded to 8 bits."""
    floats, top_k, device = in_doubles(in_floats(weights)), chosen.experts.shape[1], x.device
    gate_up, down = (each.unflatten(0, (weights.num_experts, -1)) for each in floats[:2])
    experts, x = chosen.experts.flatten().long(), rounded(x, weights.gate_up.group)
    biases = [
        torch.zeros(1, dtype=torch.float64, device=device) if bias is None
        else bias.unflatten(0, (weights.num_experts, -1))[experts]
        for bias in (floats.gate_up_bias, floats.down_bias)
    ]  # fmt: skip

    def multiply(matrices, x):
        y = x.new_empty(len(experts), matrices.shape[1])
        for expert, matrix in enumerate(matrices):
            y[experts == expert] = x[experts == expert] @ matrix.T
        return y

    y = multiply(gate_up, x.repeat_interleave(top_k, 0)) + biases[0]
    gated = activate_torch(y, weights.is_clamped).to(on(device, torch.bfloat16, torch.float32))
    gated = rounded(gated, weights.down.group)
    y = multiply(down, gated) + biases[1]
    return y.unflatten(0, (-1, top_k)) * chosen.weights[..., None]


def exact_mixture(x, weights, chosen):
    return moe.run_experts_torch(x.double(), in_doubles(in_floats(weights)), in_doubles(chosen))


def in_doubles(parts):
    return parts._replace(**{
        name: value.double() for name, value in parts._asdict().items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    })  # fmt: skip


@pytest.mark.parametrize("has_bias", [False, True])
@on_devices
@pytest.mark.parametrize("name", QUANTISED)
def test_experts_of_few_bits_match_plain_arithmetic(device, name, has_bias):
    skip_most_on_a_cpu(device, name, has_bias)
    dtype = on(device, torch.bfloat16, torch.float32)
    for num_experts, hidden, width in on(device, QUANTISED_SIZES, [(2, 160, 32)]):
        weights = make_quantised_experts(name, num_experts, hidden, width, device, has_bias)
        all_tiles = [(1, 1), (3, 3), (8, 2), (40, 5), (150, 4), (512, 2)]
        sizes = all_tiles if num_experts == 8 else [(3, 3), (40, 5)]
        for rows, top_k in on(device, sizes, [(5, 1)]):
            x = rand(rows, 2 * hidden, device=device, dtype=dtype)[:, :hidden]
            chosen = choose(rows, top_k, num_experts, device)
            for is_prefill in on(device, [False, True], [False]):
                kernels = moe.choose_kernels(x, weights, True)
                assert kernels is not moe.DENSE
                got = run_grouped(x, weights, chosen, is_prefill)
                assert got.dtype == dtype
                if kernels in (moe.FP8, moe.FP8_BLOCKS):
                    expected = rounded_mixture(x, weights, chosen)
                    # The last bits of a sum may decide a row's largest gated value, and so its scale and how
                    # all of the row is rounded to 8 bits.
                    assert (got - expected).norm() < 4e-2 * expected.norm()
                else:  # in bricks inputs are rounded as to bfloat16
                    limit = tolerance(torch.bfloat16 if "bricks" in name else dtype)
                    if "offsets" in name and dtype == torch.bfloat16:  # rounded alike for a whole group
                        limit *= 4
                    assert error(got, exact_mixture(x, weights, chosen)) < limit


@on_devices
def test_inputs_of_experts_in_int4_may_be_rounded_to_8_bits(device):
    """With every tile."""
    skip_unless_hopper(device)
    dtype = on(device, torch.bfloat16, torch.float32)
    for name in on(device, ["int4, groups of 128 with zeros", "int4, a scale a row"], ["int4, a zero a row"]):
        weights = make_quantised_experts(name, 2, 256, 128, device, False)
        rounding = (each._replace(rounds_inputs=True) for each in weights[:2])
        weights = ExpertWeights(*rounding, *weights[2:])
        for rows, top_k in on(device, [(3, 2), (30, 2), (60, 2), (300, 1)], [(5, 2)]):
            x, chosen = rand(rows, 256, device=device, dtype=dtype), choose(rows, top_k, 2, device)
            assert moe.choose_kernels(x, weights, True) is moe.ROUNDED_INT4
            got = run_grouped(x, weights, chosen, False)
            expected = rounded_mixture(
                x, weights, chosen, lambda x, _: in_order(fp8_linear.quantise(x, 0, 2))
            )
            # As above, of 8 bits.
            assert (got - expected).norm() < on(device, 4e-2, 1e-4) * expected.norm()


@on_devices
def test_numbers_of_mxfp4_in_bricks_are_multiplied_as_they_are(device):
    """A row that is 1 at one input gives that input's, or 0 if the scale is far below its row's largest."""
    skip_unless_hopper(device)
    weight = make_quantised("mxfp4", 1, 64, 160, "cpu")
    scales = torch.randint(114, 129, (64, 5), dtype=torch.uint8)
    scales[:, 1] = 128
    weight = weight._replace(scales=scales.view(torch.float8_e8m0fnu))
    expected = dequantise_torch(weight, slice(0, 64), torch.float32).T
    expected *= (scales > 128 - 12).repeat_interleave(32, 1).T
    weight = in_bricks(weight)
    weight = weight._replace(
        **{name: getattr(weight, name).to(device) for name in ("codes", "scales", "largest")}
    )
    x = torch.eye(160, device=device, dtype=on(device, torch.bfloat16, torch.float32))
    for tile in [*moe.MXFP4_TILES.values()][:: on(device, 1, 3)]:
        groups = sort_assignments(torch.zeros(160, 1, dtype=torch.int32, device=device), 1, tile[0])
        out = torch.full((160, 64), NAN, device=device, dtype=x.dtype)
        moe.multiply_mxfp4(x, weight, GroupedProduct(None, groups, out, tile))
        torch.testing.assert_close(out.float().cpu(), expected, rtol=1e-6, atol=0)


@on_devices
def test_inputs_of_mxfp4_in_bricks_may_be_rounded_to_8_bits(device):
    """Such numbers are multiplied as they are, by every tile; others are rounded, with a scale a token."""
    skip_unless_hopper(device)
    weight = make_quantised("mxfp4 in bricks", 1, 64, 160, device)._replace(rounds_inputs=True)
    matrix = dequantise_torch(in_rows(weight), slice(0, 64), torch.float64).to(device)
    x = rand(40, 160, device=device, dtype=on(device, torch.bfloat16, torch.float32))
    exact = (64 * x).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)
    exact[:, 0] = 448.0  # the largest, which has a scale of 1
    for tile in [*moe.MXFP4_TILES.values()][:: on(device, 1, 3)]:
        groups = sort_assignments(torch.zeros(40, 1, dtype=torch.int32, device=device), 1, tile[0])
        out = torch.full((40, 64), NAN, device=device, dtype=x.dtype)
        moe.multiply_mxfp4(exact, weight, GroupedProduct(None, groups, out, tile))
        assert error(out, exact.double() @ matrix.T) < tolerance(torch.bfloat16)
        if device == "cuda":  # the interpreter does not round to the nearest
            moe.multiply_mxfp4(x, weight, GroupedProduct(None, groups, out, tile))
            assert error(out, as_quantised(x, 0) @ matrix.T) < tolerance(torch.bfloat16)
            assert error(out, x.double() @ matrix.T) > tolerance(torch.bfloat16)


def test_bricks_hold_what_rows_held():
    weight = make_quantised("mxfp4", 2, 16, 96, "cpu")
    bricks = in_bricks(weight)
    assert bricks.codes.shape == (2, 1, 16, 64) and bricks.scales.shape == (2, 1, 16, 4)
    assert bricks.codes[1, 0, 3, :48].tolist() == weight.codes[19].tolist()
    assert torch.equal(bricks.largest, weight.readable_scales.amax(1))
    for got, expected in zip(in_rows(bricks)[:3], weight[:3], strict=True):
        assert got == expected if isinstance(got, tuple) else torch.equal(got, expected)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the test above does it")
@pytest.mark.parametrize("name, width", [("fp8, a scale a row", 160), ("fp8, blocks", 256)])
def test_products_in_8_bits_are_those_of_rounded_inputs_on_a_cpu(monkeypatch, name, width):
    # The interpreter rounds 127 to 64, for want of a carry to the exponent.
    monkeypatch.setattr(grouped_fp8, "quantise", fp8_linear.quantise_torch)
    weight, x, chosen = make_quantised(name, 2, 256, width, "cpu"), rand(5, width), choose(5, 1, 2, "cpu")
    groups, tile = sort_assignments(chosen.experts, 2, 16), Tile(16, 2)
    matrices = dequantise_torch(weight, slice(0, 512), torch.float64).unflatten(0, (2, 256))
    rounded = as_quantised(x, weight.group)
    products = (matrices[chosen.experts[:, 0].long()] @ rounded[..., None])[..., 0]
    gated, out = torch.empty(5, 128), torch.empty(5, 256)
    grouped_fp8.multiply_fp8(x, weight, GroupedProduct(None, groups, out, tile, weights=chosen.weights))
    assert error(out, products * chosen.weights) < 1e-6
    grouped_fp8.multiply_fp8(x, weight, GroupedProduct(None, groups, gated, tile, top_k=1))
    assert error(gated, activate_torch(products)) < 1e-6
    bias = rand(512)
    rows = fp8_linear.quantise_torch(x, weight.group)
    grouped_fp8.multiply_fp8(rows, weight, GroupedProduct(bias, groups, out, tile))
    assert error(out, products + bias.view(2, 256)[chosen.experts[:, 0].long()]) < 1e-6


@pytest.mark.parametrize("has_bias", [False, True])
@on_devices
@pytest.mark.parametrize("name", QUANTISED)
def test_a_few_rows_and_experts_of_few_bits_match_plain_arithmetic(monkeypatch, device, name, has_bias):
    skip_most_on_a_cpu(device, name, has_bias)
    if device == "cpu":
        monkeypatch.setattr(quantised_matvec, "HEIGHT", 64)
    dtype = on(device, torch.bfloat16, torch.float32)
    for num_experts, hidden, width in on(device, QUANTISED_SIZES, [(2, 160, 32)]):
        weights = make_quantised_experts(name, num_experts, hidden, width, device, has_bias)
        norm_weight = (1 + rand(hidden, device=device) / 4).to(dtype)
        for rows, top_k in on(device, [(1, 1), (1, 6), (2, 3), (4, 2)], [(1, 2)]):
            x, residual = (rand(rows, 2 * hidden, device=device, dtype=dtype)[:, :hidden] for _ in range(2))
            chosen = choose(rows, top_k, num_experts, device)
            got = moe.run_gemv(moe.GEMV_CODES, x, weights, chosen, norm_weight, EPS, residual)
            wide = x.double()
            normed = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * norm_weight.double()
            expected = exact_mixture(normed, weights, chosen).sum(1) + residual
            assert got.dtype == dtype and error(got, expected) < tolerance(dtype)
            got = moe.run_gemv(moe.GEMV_CODES, x, weights, chosen)
            assert error(got, exact_mixture(x, weights, chosen).sum(1)) < tolerance(dtype)


@on_devices
@in_both_types
@pytest.mark.parametrize("hidden", [40, 2048])
def test_the_sum_with_the_residual_and_its_norm_match_their_twin(device, dtype, hidden):
    for rows in (1, 7):
        shapes = (rows, 3, hidden), (hidden,), (rows, 2 * hidden)
        parts, weight, residual = (rand(*shape, device=device, dtype=dtype) for shape in shapes)
        residual = residual[:, :hidden]
        quantised, total, normed = fp8_linear.prepare_rows(
            parts, None, True, residual=residual, weight=weight, eps=EPS
        )
        expected = parts.double().sum(1) + residual.double()
        assert total.dtype == normed.dtype == dtype and error(total, expected) < tolerance(dtype)
        assert error(normed, rms_norm_torch(total, weight, EPS)) < tolerance(dtype)
        assert quantised is None


@on_devices
def test_no_rows_are_no_work(device):
    x, weights = rand(0, 64, device=device, dtype=HALF), make_experts(4, 64, 24, device, HALF)
    chosen = router.choose_experts(rand(0, 4, device=device), 2, True)
    parts = run_grouped(x, weights, chosen)
    assert parts.shape == (0, 2, 64)
    _, *sums = fp8_linear.prepare_rows(parts, None, True, residual=x, weight=x.new_ones(64), eps=EPS)
    assert all(out.shape == (0, 64) for out in sums)


@on_devices
def test_a_row_does_not_depend_on_the_rows_beside_it(device):
    """Bit for bit, wherever it lands in its expert's tiles."""
    weights, x = make_experts(4, 64, 24, device, HALF), rand(30, 64, device=device, dtype=HALF)
    chosen = choose(30, 2, 4, device)
    together = run_grouped(x, weights, chosen)
    order = torch.randperm(30, device=device)
    again = run_grouped(x[order], weights, router.Chosen(*(part[order] for part in chosen)))
    assert torch.equal(together[order], again)


@on_devices
@pytest.mark.parametrize("rows, is_prefill", [(2, False), (2, True), (6, False)])
@pytest.mark.parametrize("is_untouched", [True, False])
def test_a_layer_computes_by_kernels_what_it_computes_by_their_twins(device, rows, is_prefill, is_untouched):
    layer = MixtureOfExperts(
        40, ExpertsConfig(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=12)
    )
    norm, next_norm = RMSNorm(40), RMSNorm(40)
    for param in (*layer.parameters(), norm.weight, next_norm.weight):
        param.data.normal_(0, 0.5)
    layer, norm, next_norm = (module.to(device) for module in (layer, norm, next_norm))
    x = rand(rows, 40, device=device)
    stream = Stream(x, norm, None if is_untouched else norm(x))
    set_context(is_prefill)
    try:
        got = layer(stream, next_norm)
    finally:
        reset_context()
    chosen = router.choose_experts_torch(norm(x) @ layer.gate.weight.T, 3, True)
    expected = x + plain_mixture(norm(x), layer.experts.weights, chosen)
    assert got.norm is next_norm
    assert error(got.normalised(), next_norm(expected.float())) < 1e-5
    assert error(got.x, expected) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 16, 256, 512])
def test_a_captured_graph_computes_what_its_inputs_hold_at_each_replay(rows):
    """At the size of a real model's layer."""
    weights = make_experts(128, 2048, 768, "cuda", torch.bfloat16)
    x, logits = rand(rows, 2048, device="cuda", dtype=torch.bfloat16), rand(rows, 128, device="cuda")

    def step():
        chosen = router.choose_experts(logits, 8, True)
        if rows <= 4:
            return moe.run_gemv(moe.GEMV, x, weights, chosen)
        return run_grouped(x, weights, chosen, False).sum(1)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for bias in (0, 30):  # at last all tokens go to the same experts
        x.normal_()
        logits.normal_()
        logits[:, 3:11] += bias
        graph.replay()
        expected = moe.run_experts_torch(x, weights, router.choose_experts_torch(logits, 8, True)).sum(1)
        assert error(out, expected) < 1e-2
    assert not arrival_counters(out.device).any()
