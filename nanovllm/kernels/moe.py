"""A mixture of experts: the choice of experts for each token, and their SwiGLU networks."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.activation import silu_and_mul_torch


class Chosen(NamedTuple):
    """The experts of each token, the most probable first, and what their outputs are multiplied by."""

    experts: Tensor  # int32 [tokens, top_k]
    weights: Tensor  # float32 [tokens, top_k]


def choose_experts(logits: Tensor, top_k: int, normalise: bool) -> Chosen:
    """
    The most probable experts by their logits [tokens, experts], of equal ones the first. Their weights are
    their probabilities among all experts, or, to normalise, among those that are chosen.
    """
    return choose_experts_torch(logits, top_k, normalise)


def choose_experts_torch(logits: Tensor, top_k: int, normalise: bool) -> Chosen:
    # Not `topk`: which of equal ones it takes is open.
    weights, experts = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, experts = weights[:, :top_k], experts[:, :top_k]
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Chosen(experts.int(), weights)


def run_experts(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Chosen) -> Tensor:
    """
    The weighted sum of what the chosen experts make of each row of x [tokens, hidden]: [tokens, hidden].
    gate_up is [experts, 2 * width, hidden], gates first, and down [experts, hidden, width].
    """
    return run_experts_torch(x, gate_up, down, chosen)


def run_experts_torch(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Chosen) -> Tensor:
    out = torch.zeros_like(x)
    experts, weights = chosen.experts.flatten(), chosen.weights.flatten().to(x.dtype)
    counts = torch.bincount(experts, minlength=len(gate_up)).tolist()
    for expert, pairs in enumerate(experts.argsort(stable=True).split(counts)):
        if len(pairs):
            tokens = pairs // chosen.experts.shape[1]
            hidden = silu_and_mul_torch(F.linear(x[tokens], gate_up[expert]))
            out.index_add_(0, tokens, F.linear(hidden, down[expert]) * weights[pairs, None])
    return out
