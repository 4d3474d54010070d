"""A mixture of experts, with the MLP's signature: a router chooses a few of many small MLPs for each token.

Every rank holds a part of each expert's width, as of an MLP's, and all ranks choose alike.
"""

from typing import Any

import torch
from torch import nn

from nanovllm.distributed.group import get_group
from nanovllm.kernels.moe import add_parts_rms_norm, run_experts
from nanovllm.kernels.moe_matvec import can_use_few, run_experts_few
from nanovllm.kernels.router import choose_experts
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import ReplicatedLinear, divide
from nanovllm.layers.quantization.scaled import Part
from nanovllm.layers.residual_stream import Stream
from nanovllm.utils.context import get_context
from nanovllm.utils.loader import default_weight_loader


class MixtureOfExperts(nn.Module):
    """
    The router `gate` gives each expert a probability; the `top_k` most probable compute, and their outputs
    are summed, weighted by their probabilities, which `normalise` makes sum to 1.
    """

    def __init__(self, hidden_size: int, width: int, num_experts: int, top_k: int, normalise: bool):
        super().__init__()
        self.top_k, self.normalise = top_k, normalise
        self.gate = ReplicatedLinear(hidden_size, num_experts)
        self.experts = Experts(hidden_size, width, num_experts)

    def forward(self, stream: Stream, next_norm: RMSNorm) -> Stream:
        chosen = choose_experts(self.gate(stream), self.top_k, self.normalise)
        weights, is_prefill = (self.experts.gate_up_proj, self.experts.down_proj), get_context().is_prefill
        is_alone = self.gate.group.size == 1
        if is_prefill or not can_use_few(stream.x):
            parts = run_experts(stream.normalised(), *weights, chosen, is_prefill)
            if is_alone:
                normed, total = add_parts_rms_norm(parts, stream.x, next_norm.weight, next_norm.eps)
                return Stream(total, next_norm, normed)
            y = parts.sum(1)
        else:
            norm = (stream.norm.weight, stream.norm.eps) if stream.is_untouched else (None, 0.0)
            x = stream.x if stream.is_untouched else stream.normalised()
            if is_alone:
                return Stream(run_experts_few(x, *weights, chosen, *norm, residual=stream.x), next_norm)
            y = run_experts_few(x, *weights, chosen, *norm)
        normed, total = next_norm(y, stream.x)
        return Stream(total, next_norm, normed)


class Experts(nn.Module):
    """The matrices of all experts, one behind the other. Checkpoints have three tensors for each expert."""

    def __init__(self, hidden_size: int, width: int, num_experts: int):
        super().__init__()
        group = get_group()
        share = divide(width, group.size)
        mine = slice(group.rank * share, group.rank * share + share)
        column_parts = [Part((width, hidden_size), mine, offset=offset) for offset in (0, share)]
        down = {"down_proj": Part((hidden_size, width), columns=mine)}
        gate_up = dict(zip(("gate_proj", "up_proj"), column_parts, strict=True))
        self.gate_up_proj = _stacked(num_experts, (2 * share, hidden_size), gate_up)
        self.down_proj = _stacked(num_experts, (hidden_size, share), down)


def _stacked(num_experts: int, shape: tuple[int, int], parts: dict[str, Part]) -> nn.Parameter:
    """[experts, *shape], which is loaded from a tensor for each expert and part."""
    param = nn.Parameter(torch.empty(num_experts, *shape), requires_grad=False)
    param.weight_loader = _load_part
    param.stored_parts = {
        f"{expert}.{name}.weight": (expert, part)
        for expert in range(num_experts)
        for name, part in parts.items()
    }
    return param


def _load_part(param: nn.Parameter, loaded_weight: Any, place: tuple[int, Part]) -> None:
    expert, part = place
    default_weight_loader(
        param.data[expert][part.place], loaded_weight, (part.rows, part.columns), part.shape
    )
