"""Which part of a model that transformers built each rank holds, by the plan that transformers has for it.

A linear layer is cut by its outputs or by its inputs, after which ranks sum up, and experts by both, as an
MLP is. What the plan would exchange in between, or leaves whole, every rank computes: the embedding and the
head, too.
"""

import functools
import re
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.distributed.group import Group, get_group
from nanovllm.layers.linear import Shard, divide, own_part
from nanovllm.utils.loader import check_stored, default_weight_loader

# By the plan's word, the dimension in which a linear layer's parameters are cut.
LINEAR = {"colwise": {"weight": 0, "bias": 0}, "rowwise": {"weight": 1}}
EXPERTS = "moe_tp_experts"
EXPERTS_CUT = {"gate_up_proj": 1, "down_proj": 2}
WHOLE = (
    "colwise_gather_output embedding_rowwise mla_kv_a_proj replicated_with_grad_allreduce rowwise_split_input"
).split()


def cut_modules(base: Any) -> dict[str, Tensor]:
    """
    Note in `cut` how modules are cut. Returns what parameters this rank has a part of, by name and without
    memory. Raises ValueError if the plan cannot be followed.
    """
    group = get_group()
    plan = base.config.base_model_tp_plan or {}
    shares = {}
    if group.size == 1:
        return shares
    for prefix, module in base.named_modules():
        way = plan.get(_generic(prefix))
        cuts = {}
        if isinstance(module, nn.Linear):
            cuts = LINEAR.get(way, {})
        elif way == EXPERTS and has_plain_experts(module):
            cuts = EXPERTS_CUT
        if cuts:
            module.cut = way
            module.nano_vllm_group = group
        elif way not in (None, *WHOLE):
            raise ValueError(f"tensor_parallel_size must be 1: {prefix} cannot be split")
        for name, param in [*module.named_parameters(recurse=False)]:
            if name in cuts:
                dim, shape = cuts[name], list(param.shape)
                shape[dim] = divide(shape[dim], group.size)
                share = nn.Parameter(param.new_empty(shape), requires_grad=False)
                shares[f"{prefix}.{name}"] = share
                if way == EXPERTS:
                    share.weight_loader = functools.partial(
                        _load_share, group=group, whole=param.shape, dim=dim
                    )
                    module.register_parameter(name, share)
            elif _generic(f"{prefix}.{name}") in plan:
                raise ValueError(f"tensor_parallel_size must be 1: {prefix}.{name} cannot be split")
    if not shares:
        raise ValueError(f"tensor_parallel_size must be 1: {type(base).__name__} has no plan to split it")
    return shares


def _generic(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def has_plain_experts(module: Any) -> bool:
    """[experts, gates and ups, inputs] and [experts, outputs, inputs]."""
    others = module.is_transposed or module.has_bias
    others |= getattr(module, "has_post_expert_norm", False)  # which older versions do not know
    return module.has_gate and module.is_concatenated and not others


def _load_share(param: nn.Parameter, loaded_weight: Any, group: Group, whole: torch.Size, dim: int) -> None:
    check_stored(loaded_weight, tuple(whole))
    matrices = loaded_weight[...].chunk(2 if dim == EXPERTS_CUT["gate_up_proj"] else 1, dim)
    share = torch.cat([matrix.chunk(group.size, dim)[group.rank] for matrix in matrices], dim)
    default_weight_loader(param, share)


def part_of(linear: nn.Linear) -> Shard:
    """This rank's share."""
    cut = getattr(linear, "cut", None)
    rows = own_part(linear.out_features) if cut == "colwise" else None
    columns = own_part(linear.in_features) if cut == "rowwise" else None
    return Shard((linear.out_features, linear.in_features), rows, columns)
