"""What config.json says of a mixture of experts."""

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from nanovllm.checkpoints.model_config import MAX_SIZE, check_size
from nanovllm.utils.validation import check, check_bool, integer, number

MAX_EXPERTS = 2**12


@dataclass(frozen=True)
class ExpertsConfig:
    """
    The mixture of experts that takes the place of some layers' MLP. Fields as in config.json. Raises
    ValueError naming one that is not possible.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: Collection[int] = ()
    shared_expert_intermediate_size: int = 0  # of an MLP for all tokens; 0: there is none
    has_shared_gate: bool = False  # which says of each token how much of that MLP's output counts
    n_group: int | None = None  # None: experts are not chosen by GLM's rule, see `SigmoidRule`
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    is_stored_together: bool = False  # one tensor has the matrices of all experts
    is_joint: bool = False  # gpt-oss's, see `MixtureOfExperts`

    def __post_init__(self) -> None:
        integer(1, MAX_EXPERTS)(self.num_experts, "num_experts")
        groups = 1 if self.n_group is None else integer(1, self.num_experts)(self.n_group, "n_group")
        check(self.num_experts % groups == 0, f"n_group must divide num_experts={self.num_experts}", groups)
        integer(1, groups)(self.topk_group, "topk_group")
        number(1e-6, 1e6)(self.routed_scaling_factor, "routed_scaling_factor")
        possible = self.num_experts // groups * self.topk_group
        integer(1, possible)(self.num_experts_per_tok, "num_experts_per_tok")
        integer(0, MAX_SIZE)(self.shared_expert_intermediate_size, "shared_expert_intermediate_size")
        check_size(self.moe_intermediate_size, "moe_intermediate_size")
        check_size(self.decoder_sparse_step, "decoder_sparse_step")
        check_bool(self.norm_topk_prob, "norm_topk_prob")
        layers = self.mlp_only_layers
        is_list = isinstance(layers, list | tuple) and all(type(layer) is int for layer in layers)
        check(is_list, "mlp_only_layers must be a list of integers", layers)

    def replaces_mlp(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


def read_experts(values: dict[str, Any], known: Collection[str]) -> ExpertsConfig | None:
    """From the fields of a model whose files may have those that are `known`; None: it has no experts."""
    if "num_experts" not in known:
        return None
    own = {"moe_intermediate_size": values["intermediate_size"]}
    own |= {field.name: values[field.name] for field in fields(ExpertsConfig) if field.name in known}
    own["num_experts"] = values.get("num_local_experts", values["num_experts"])  # the newer spelling
    own.setdefault("has_shared_gate", "shared_expert_intermediate_size" in known)
    return ExpertsConfig(**own)
