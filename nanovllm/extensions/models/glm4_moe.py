"""GLM-4.5 and 4.6: behind layers with an MLP come those with a mixture of experts beside an MLP. Half of each
head is rotated.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from nanovllm.checkpoints.model_config import MAX_LAYERS
from nanovllm.extensions.models.gguf import IN_GROUPS, Fields, GGUFModel
from nanovllm.extensions.models.partial_rotation import PartlyRotated
from nanovllm.utils.validation import integer


class Glm4MoeForCausalLM(PartlyRotated):
    model_type = "glm4_moe"
    defaults = {
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    }
    has_output_bias = False
    gguf = GGUFModel("glm4moe", "glm4_moe", IN_GROUPS, rotates_part=True)

    @staticmethod
    def read_facts(values: Fields) -> Fields:
        """The experts that are for all tokens are one MLP."""
        shared, first = (
            integer(0, MAX_LAYERS)(values[name], name)
            for name in ("n_shared_experts", "first_k_dense_replace")
        )
        return {
            "shared_expert_intermediate_size": shared * values["moe_intermediate_size"],
            "has_shared_gate": False,
            "mlp_only_layers": [*range(first)],
        }

    def converted(self, tensors: Iterable[Any], known: Any) -> Iterator[Any]:
        """Without the layer behind the last, which predicts one more token."""
        further = f"model.layers.{len(self.model.layers)}."
        yield from super().converted((each for each in tensors if not each.name.startswith(further)), known)
