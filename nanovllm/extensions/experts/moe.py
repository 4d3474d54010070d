"""A mixture of experts, with the MLP's signature: a router chooses a few of many small MLPs for each token.

Every rank holds a part of each expert's width, as of an MLP's, and all ranks choose alike.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.distributed.group import get_group
from nanovllm.extensions.experts.config import ExpertsConfig
from nanovllm.extensions.experts.kernels.experts import ExpertWeights
from nanovllm.extensions.experts.kernels.moe import (
    FP8,
    FP8_BLOCKS,
    Gemv,
    choose_kernels,
    run_gemv,
    run_grouped,
)
from nanovllm.extensions.experts.kernels.router import Chosen, SigmoidRule, choose_experts
from nanovllm.extensions.quantised.gguf import GGUF
from nanovllm.extensions.quantised.products import PendingAdd, quantised_rows
from nanovllm.extensions.quantised.scaled import ScaledWeight
from nanovllm.layers.layernorm import RMSNorm, Stream
from nanovllm.layers.linear import DenseWeight, LinearBase, ReplicatedLinear, Shard, Weight, own_part
from nanovllm.models.qwen3 import Qwen3MLP
from nanovllm.utils.context import get_context
from nanovllm.utils.loader import StoredTensor


class MixtureOfExperts(nn.Module):
    """
    The experts that the router `gate` chooses compute, and their outputs are summed by its weights. Joint
    ones are gpt-oss's: stored together, with biases, another activation, and weights that add up to 1. Beside
    them there may be an MLP for all tokens, which checkpoints call by another name if it has a gate.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig):
        super().__init__()
        router = Router if config.n_group is None else SigmoidRouter
        self.gate = router(hidden_size, config)
        self.experts = Experts(hidden_size, config)
        self.shared_expert = self.shared_experts = None
        if width := config.shared_expert_intermediate_size:
            name = "shared_expert" if config.has_shared_gate else "shared_experts"
            setattr(self, name, Qwen3MLP(hidden_size, width))

    def forward(self, stream: Stream, next_norm: RMSNorm) -> Stream:
        weights, is_alone = self.experts.weights, self.gate.group.size == 1
        is_prefill = get_context().is_prefill
        kernels = choose_kernels(stream.x, weights, is_prefill)
        is_few = isinstance(kernels, Gemv)
        rows = None
        if kernels in (FP8, FP8_BLOCKS):
            rows = quantised_rows(stream, weights.gate_up.group, keep=True)
        logits = self.gate(stream)
        chosen = self.gate.choose(logits)
        norm, x = (None, 0.0), stream.x
        if is_few and stream.is_untouched:
            norm = stream.norm.weight, stream.norm.eps
        else:
            x = stream.normalised()
        if is_alone and self.shared_experts:  # the product may fold the addition in
            before = self.shared_experts(stream, next_norm).residual()
        else:
            before = self.add_shared(stream.residual() if is_alone else None, stream, logits)
        if is_few:
            y = run_gemv(kernels, x, weights, chosen, *norm, before)
            return Stream(y, next_norm) if is_alone else stream.add(y, next_norm)
        parts = run_grouped(kernels, x, weights, chosen, is_prefill, rows)
        if is_alone:
            return PendingAdd(before, next_norm, pending_add=parts)
        y = parts.sum(1)
        return stream.add(y if before is None else y + before, next_norm)

    def add_shared(self, y: Tensor | None, stream: Stream, logits: Tensor) -> Tensor | None:
        """y [tokens, hidden] plus what the MLP for all tokens computes, if there is one. None is 0."""
        shared = self.shared_expert or self.shared_experts
        if shared is None:
            return y
        gated = shared.gate_up_proj(stream, silu_and_mul=True)
        added = shared.down_proj.product(len(stream.x)).linear(gated, None)
        if self.shared_expert:
            added = added * logits[:, self.experts.num_experts :].sigmoid()
        return added if y is None else y + added


class Router(ReplicatedLinear):
    """
    Chooses experts by its product with a token, whose last column is the gate of the MLP for all tokens, if
    there is one. Checkpoints do not quantise it.
    """

    is_quantisable = False

    def __init__(self, hidden_size: int, config: ExpertsConfig):
        self.num_experts = config.num_experts
        shards = {None: Shard((self.num_experts, hidden_size))}
        if config.has_shared_gate:
            shards["shared"] = Shard((1, hidden_size))
        LinearBase.__init__(self, shards, config.is_joint)
        self.routing = config.num_experts_per_tok, config.norm_topk_prob

    def forward(self, stream: Stream) -> Tensor:
        """[tokens, experts], and the gate."""
        if stream.is_untouched:
            return super().forward(stream)
        # The norm is begun, so there is nothing to fold in: the plain product does.
        return self.matrix.norm_linear(stream, self.bias)

    def choose(self, logits: Tensor) -> Chosen:
        return choose_experts(logits[:, : self.num_experts], *self.routing)


class SigmoidRouter(Router):
    """By `SigmoidRule`. Computes in float32, since scores near 1 differ by little."""

    def __init__(self, hidden_size: int, config: ExpertsConfig):
        super().__init__(hidden_size, config)
        bias = torch.zeros(config.num_experts, dtype=torch.float32)
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)
        factors = config.n_group, config.topk_group, config.routed_scaling_factor
        self.routing += (SigmoidRule(self.e_score_correction_bias, *factors),)

    def set_matrix(self, matrix: Weight) -> None:
        if matrix.weight.dtype != torch.float32:
            matrix.weight.data = matrix.weight.float()
        super().set_matrix(matrix)

    def forward(self, stream: Stream) -> Tensor:
        return self.matrix.multiply(stream.normalised().float())


class Experts(nn.Module):
    """
    The matrices of all experts. Checkpoints have three tensors for each expert; of those that are stored
    together two for all, and of joint ones as many biases.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig):
        super().__init__()
        self.num_experts, self.is_joint = config.num_experts, config.is_joint
        self.group = get_group()
        width = config.moe_intermediate_size
        mine = own_part(width)
        gates_and_ups, downs = {}, {}
        for expert in range(self.num_experts):
            for name in ("gate_proj", "up_proj"):
                gates_and_ups[f"{expert}.{name}"] = Shard((width, hidden_size), mine)
            downs[f"{expert}.down_proj"] = Shard((hidden_size, width), columns=mine)
        linear = JointLinear if config.is_stored_together else StackedLinear
        self.gate_up_proj, self.down_proj = linear(gates_and_ups, self.is_joint), linear(downs, self.is_joint)

    @property
    def weights(self) -> ExpertWeights:
        """For kernels. Rank 0 alone adds the second bias."""
        matrices = self.gate_up_proj.for_kernels, self.down_proj.for_kernels
        biases = self.gate_up_proj.bias, self.down_proj.bias if self.group.rank == 0 else None
        return ExpertWeights(*matrices, self.num_experts, *biases, self.is_joint)


class StackedLinear(LinearBase):
    """
    The same matrix of all experts, one below the other. `shards` have the names that the experts' matrices
    have in checkpoints, in the module that this one is in.
    """

    def set_matrix(self, matrix: Weight) -> None:
        self.is_dense, is_scaled = isinstance(matrix, DenseWeight), isinstance(matrix, ScaledWeight)
        matrix.is_stacked = True
        if isinstance(matrix, GGUF):
            matrix.library = None
        elif not (self.is_dense or is_scaled) or getattr(matrix, "order", None) is not None:
            kind = "inputs in an order of their own" if is_scaled else type(matrix).__name__
            raise ValueError(f"quantised weights of experts with {kind} are not supported")
        super().set_matrix(matrix)
        if self.is_dense:
            matrix.stored = {"weight": StoredTensor(functools.partial(_fill, matrix.weight))}
        for param in self.parameters():
            param.weight_loader = None  # see `stored_tensors`

    def finish(self) -> None:
        if not self.is_dense:  # of a dense one, an expert's part is multiplied
            super().finish()

    @property
    def for_kernels(self) -> Any:
        if self.is_dense:
            return self.matrix.weight
        packed = getattr(self.matrix, "packed", None)
        return self.matrix.quantised if packed is None else packed

    def names_in_checkpoint(self, name: str) -> list[str]:
        """Of the first expert: others that differ find no place when they are loaded."""
        return [f"{name.rpartition('.')[0]}.{source}" for source in self.shards if source.startswith("0.")]

    def stored_tensors(self, name: str) -> dict[str, StoredTensor]:
        parent = name.rpartition(".")[0]
        return {
            f"{parent}.{source}.{inner}": each._replace(load=functools.partial(_load, each.load, shard))
            for source, shard in self.shards.items()
            for inner, each in self.with_bias().items()
        }

    def with_bias(self) -> dict[str, StoredTensor]:
        """What checkpoints have of it."""
        if self.bias is None:
            return self.matrix.stored
        return self.matrix.stored | {"bias": StoredTensor(functools.partial(_fill, self.bias))}


def _fill(param: nn.Parameter, loaded_weight: torch.Tensor, shard: Shard) -> None:
    shard.load(param.data, loaded_weight)


def _load(load: Any, shard: Shard, loaded_weight: torch.Tensor) -> None:
    load(loaded_weight, shard)


class JointLinear(StackedLinear):
    """
    `StackedLinear` of checkpoints that have one tensor for all experts: with biases gates and ups in turn
    (gpt-oss's), else one behind the other (Llama 4's). The latter are called {name}_weight here, since MLPs
    beside them have a `gate_up_proj`, too. One in floating point has the inputs first.
    """

    def names_in_checkpoint(self, name: str) -> list[str]:
        return [name]

    def stored_tensors(self, name: str) -> dict[str, StoredTensor]:
        stored = self.with_bias()
        if unknown := stored.keys() - {"weight", "blocks", "scales", "bias"}:
            raise ValueError(f"quantised weights of joint experts with {min(unknown)} are not supported")
        return {
            name if inner == "weight" and self.bias is not None else f"{name}_{inner}": each._replace(
                load=functools.partial(self._load_each, each.load, inner == "weight")
            )
            for inner, each in stored.items()
        }

    def _load_each(self, load: Any, is_transposed: bool, loaded_weight: Any) -> None:
        """Take the experts' shards out of the tensor of all."""
        per_expert = sum(name.startswith("0.") for name in self.shards)
        if loaded_weight.shape[0] != len(self.shards) // per_expert:
            raise ValueError(f"holds {loaded_weight.shape[0]} experts, not {len(self.shards) // per_expert}")
        for number, shard in enumerate(self.shards.values()):
            matrix = loaded_weight[number // per_expert]
            matrix = matrix.t() if is_transposed else matrix
            if self.bias is None:
                parts = matrix.tensor_split(per_expert)
            else:
                parts = [matrix[part::per_expert] for part in range(per_expert)]
            load(parts[number % per_expert], shard)
