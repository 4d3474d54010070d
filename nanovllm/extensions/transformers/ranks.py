"""Which part of a model that transformers built each rank holds, by the plan that transformers has for it.

A linear layer is cut by its outputs or by its inputs, after which ranks sum up; experts cut themselves. What
the plan would exchange in between, or leaves whole, every rank computes: the embedding and the head, too.
"""

import re
from typing import Any

from torch import Tensor, nn

from nanovllm.distributed.group import get_group
from nanovllm.layers.linear import Shard, own_part

# By the plan's word, the dimension in which a linear layer's parameters are cut.
LINEAR = {"colwise": {"weight": 0, "bias": 0}, "rowwise": {"weight": 1}}
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
    shares, are_experts_cut = {}, False
    if group.size == 1:
        return shares
    for prefix, module in base.named_modules():
        if has_plain_experts(module):
            are_experts_cut = True
            continue
        way = plan.get(_generic(prefix))
        cuts = LINEAR.get(way, {}) if isinstance(module, nn.Linear) else {}
        if cuts:
            module.cut = way
        elif way not in (None, *WHOLE) or getattr(module, "activation_sparsity", 0):  # depends on all gates
            raise ValueError(f"tensor_parallel_size must be 1: {prefix} cannot be split")
        for name, param in module.named_parameters(recurse=False):
            if name in cuts:
                shares[f"{prefix}.{name}"] = param.chunk(group.size, cuts[name])[0]
            elif _generic(f"{prefix}.{name}") in plan:
                raise ValueError(f"tensor_parallel_size must be 1: {prefix}.{name} cannot be split")
    if not (shares or are_experts_cut):
        raise ValueError(f"tensor_parallel_size must be 1: {type(base).__name__} has no plan to split it")
    return shares


def _generic(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def has_plain_experts(module: Any) -> bool:
    """SwiGLU of [experts, gates and ups, inputs] and [experts, outputs, inputs]."""
    from transformers.integrations.moe import _default_apply_gate

    if getattr(module, "_apply_gate", None) is None:
        return False
    others = module.is_transposed or module.has_bias
    others |= getattr(module, "has_post_expert_norm", False)  # which older versions do not know
    is_silu = type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    is_usual = is_silu and type(module)._apply_gate is _default_apply_gate
    return module.has_gate and module.is_concatenated and is_usual and not others


def part_of(linear: nn.Linear) -> Shard:
    """This rank's share."""
    cut = getattr(linear, "cut", None)
    rows = own_part(linear.out_features) if cut == "colwise" else None
    columns = own_part(linear.in_features) if cut == "rowwise" else None
    return Shard((linear.out_features, linear.in_features), rows, columns)
