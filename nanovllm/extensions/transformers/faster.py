"""Parts of transformers' models for which this project has faster ones: products, experts, norms, rotations.

What a norm, a network or a rotation is, is found out by what it computes: it is replaced only where random
numbers show that the other one computes the same.
"""

import functools
import inspect
import types
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from nanovllm.extensions.experts.config import ExpertsConfig
from nanovllm.extensions.experts.kernels.moe import run_experts
from nanovllm.extensions.experts.kernels.router import Chosen
from nanovllm.extensions.experts.moe import Experts
from nanovllm.extensions.transformers.ranks import has_plain_experts, part_of
from nanovllm.kernels.layernorm import rms_norm_torch
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import LinearBase, Shard, activated
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.context import get_context

ROTATE = "apply_rotary_pos_emb"  # the name that the function has in transformers
GATED = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
# Where a GatedMLP's parts are stored, as `packed_modules_mapping` says it.
PACKED = {"gate_proj": ("gate_and_up", 0), "up_proj": ("gate_and_up", 1)}


class Linear(LinearBase):
    """
    For input of any number of dimensions. `is_part`: the ranks' products have to be summed up;
    `is_stored_transposed`: checkpoints have its weight as [in, out].
    """

    is_part = False
    is_stored_transposed = False

    def forward(self, x: Tensor, silu_and_mul: bool = False) -> Tensor:
        """With silu_and_mul the first half of the product are gates, the second is what they multiply."""
        rows = x.flatten(0, -2)
        bias = self.bias if self.group.rank == 0 or not self.is_part else None
        y = activated(self.product(len(rows)).linear(rows, bias, silu_and_mul))
        y = self.group.all_reduce(y) if self.is_part else y
        return y.view(*x.shape[:-1], -1)


def linear_like(module: nn.Linear) -> Linear:
    linear = Linear({None: part_of(module)}, module.bias is not None)
    linear.is_part = getattr(module, "cut", None) == "rowwise"
    linear.is_quantisable = module.out_features > 1  # the gate of a shared expert stays as it is
    return linear


class GatedMLP(nn.Module):
    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.gate_and_up = Linear({0: part_of(mlp.gate_proj), 1: part_of(mlp.up_proj)})
        self.down_proj = linear_like(mlp.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_and_up(x, silu_and_mul=True))


class PlainExperts(Experts):
    """Every rank holds a part of each expert's width."""

    def __init__(self, experts: Any):
        num_experts, hidden_size, width = experts.down_proj.shape
        super().__init__(hidden_size, ExpertsConfig(num_experts, 1, width))

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, hidden], experts int64 and their weights [tokens, top_k], to [tokens, hidden]."""
        chosen = Chosen(experts.int().contiguous(), weights.float().contiguous())
        return self.group.all_reduce(run_experts(x, self.weights, chosen, get_context().is_prefill))


def replacement(module: nn.Module) -> nn.Module | None:
    """What computes the same as a module that needs no memory yet; None if nothing is known that does."""
    from transformers.pytorch_utils import Conv1D

    x = _random(2, 3)
    if isinstance(module, nn.Linear):
        weights = {"weight": _random(5, 3), "bias": _random(5)}
        is_plain = _gives(F.linear(x, **weights), functional_call, module, weights, x)
        return linear_like(module) if is_plain else None
    if type(module) is Conv1D:
        linear = Linear({None: Shard((module.nf, module.nx))}, bias=True)
        linear.is_stored_transposed = True
        return linear
    if has_plain_experts(module):
        return PlainExperts(module)
    params = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if [*params] == ["weight"] and isinstance(eps, float):
        size = len(params["weight"])
        weight, x = _random(size) + 1, _random(2, size) * eps**0.5
        if _gives(rms_norm_torch(x, weight, eps), functional_call, module, {"weight": weight}, x):
            return RMSNorm(size, eps)
    if sorted(params) == sorted(GATED):
        gate, down = _random(5, 3), _random(3, 5)
        up = gate.flip(0)  # unlike gates, or they could change places
        weights = dict(zip(GATED, (gate, up, down), strict=True))
        expected = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        if _gives(expected, functional_call, module, weights, x):
            return GatedMLP(module)
    return None


def _random(*shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _gives(expected: Any, function: Callable[..., Any], *inputs: Any) -> bool:
    try:
        torch.testing.assert_close(function(*inputs), expected, rtol=1e-4, atol=1e-6)
    except Exception:  # it gives something else, or wants other arguments
        return False
    return True


def sparse_gates(module: Any, gates: Tensor) -> Tensor:
    """
    In place of Gemma 3n's `_gaussian_topk`, which copies a number to the device, as no CUDA graph can: what
    is above that part of all gates that `activation_sparsity` says, if they are normally distributed.
    """
    deviations = NormalDist().inv_cdf(module.activation_sparsity)
    deviations = torch.tensor(deviations, dtype=gates.dtype, device="cpu").item()
    cutoff = gates.mean(-1, keepdim=True) + gates.std(-1, unbiased=False, keepdim=True) * deviations
    return F.relu(gates - cutoff)


class Rotation(RotaryEmbedding):
    """Of the tokens of one step, from cos and sin [1, tokens, head_dim], whose halves are alike."""

    def __init__(self, cos: Tensor, sin: Tensor):
        halves = [each[0].chunk(2, dim=-1)[0] for each in (cos, sin)]
        super().__init__(torch.cat(halves, dim=-1).float())
        self.positions = torch.arange(cos.shape[1], device=cos.device)


def change_methods(base: nn.Module) -> None:
    """
    Let attention modules hand over queries and keys that are not rotated yet, with a `rotation` that says how
    they have to be. One that changes them after that must lose the `forward` that it gets here. What cannot
    be in a CUDA graph, or fails on a GPU, is replaced, too.
    """
    for module in base.modules():
        if hasattr(module, "_gaussian_topk"):
            module._gaussian_topk = types.MethodType(sparse_gates, module)
        if isinstance(table := getattr(module, "embed_tokens_per_layer", None), nn.Embedding):
            table.register_forward_pre_hook(known_tokens)
        forward = inspect.unwrap(type(module).forward)  # without what renames its arguments
        code = getattr(forward, "__code__", None)
        if code and ROTATE in code.co_names and rotates_halves(forward.__globals__.get(ROTATE)):
            names = {**forward.__globals__, ROTATE: note_rotation}
            changed = types.FunctionType(code, names, None, forward.__defaults__, forward.__closure__)
            module.forward = types.MethodType(changed, module)


def known_tokens(table: nn.Embedding, inputs: tuple[Tensor]) -> Tensor:
    """A table of each layer may end before the vocabulary does: versions differ in whether they heed that."""
    return torch.where(inputs[0] < table.num_embeddings, inputs[0], 0)


def hands_over_rotation(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether these have come straight from the function, and whole heads are to be rotated."""
    rotation = getattr(query, "rotation", None)
    if rotation is None or getattr(key, "rotation", None) is not rotation:
        return False
    return rotation.cos_sin_cache.shape[-1] == query.shape[-1] == value.shape[-1]


def note_rotation(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """In place of transformers' function. All layers of a step have the same cosines."""
    if not hasattr(cos, "rotation"):
        cos.rotation = Rotation(cos, sin)
    query.rotation = key.rotation = cos.rotation
    return query, key


@functools.cache
def rotates_halves(function: Callable[..., Any]) -> bool:
    """Whether the function is Llama's, as RotaryEmbedding is; others rotate neighbours, or parts of heads."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    angles = _random(2, 1, 3, 4).repeat(1, 1, 1, 2)
    inputs = _random(1, 2, 3, 8), _random(1, 1, 3, 8), *angles
    return _gives(apply_rotary_pos_emb(*inputs), function, *inputs)
