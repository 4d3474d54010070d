"""Llama 4, the part of it that reads text: experts whose inputs are weighted, beside an MLP for all tokens.

Most layers rotate queries and keys and attend in chunks. The others know no positions, see everything before
a token, and sharpen their scores a little as a text grows.
"""

import torch
from torch import Tensor

from nanovllm.checkpoints.model_config import MAX_SIZE, check_size
from nanovllm.extensions.experts.config import ExpertsConfig
from nanovllm.extensions.experts.kernels.moe import run_experts
from nanovllm.extensions.experts.kernels.router import Chosen, SigmoidRule
from nanovllm.extensions.experts.moe import MixtureOfExperts
from nanovllm.extensions.models.decoder import DecoderConfig
from nanovllm.extensions.models.partial_rotation import PartlyRotated
from nanovllm.extensions.models.rope import FULL, Fields, rotating_layers
from nanovllm.layers.layernorm import RMSNorm, Stream
from nanovllm.models.qwen3 import Qwen3Attention
from nanovllm.utils.context import get_context
from nanovllm.utils.validation import check, integer, number

CHUNKED = "chunked_attention"
CHECKS = {
    "attention_chunk_size": integer(1, MAX_SIZE, None),
    "intermediate_size_mlp": check_size,
    "interleave_moe_layer_step": check_size,
    "floor_scale": number(1, 1e9),
    "attn_scale": number(0, 1e6),
}


class WithoutPositions(Qwen3Attention):
    """Queries are multiplied by `temperatures`, float32 [positions], and nothing is rotated."""

    temperatures: Tensor

    def attend(self, positions: Tensor, qkv: Tensor) -> Tensor:
        queries = qkv[:, : self.qkv_proj.shards["q"].size[0]]
        queries *= self.temperatures[positions, None]
        return super().attend(torch.zeros_like(positions), qkv)  # whose angles are 0


class WeightedInputs(MixtureOfExperts):
    """A token is multiplied by the sigmoid of an expert's logit before that expert computes it."""

    def __init__(self, hidden_size: int, config: ExpertsConfig):
        super().__init__(hidden_size, config)
        self.gate.routing = config.num_experts_per_tok, False, SigmoidRule()

    def forward(self, stream: Stream, next_norm: RMSNorm) -> Stream:
        x = stream.normalised()
        stream = Stream(stream.residual(), stream.norm, x)
        logits = self.gate(stream)
        experts, weights = self.gate.choose(logits)
        inputs = x[:, None] * weights.to(x.dtype)[..., None]  # [tokens, top_k, hidden]
        chosen = Chosen(experts.view(-1, 1), torch.ones_like(weights).view(-1, 1))
        y = run_experts(inputs.flatten(0, 1), self.experts.weights, chosen, get_context().is_prefill)
        return stream.add(self.add_shared(y.view_as(inputs).sum(1), stream, logits), next_norm)


class Llama4ForCausalLM(PartlyRotated):
    model_type = "llama4_text"
    defaults = {
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "use_qk_norm": True,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "num_experts": 16,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 16384,
        "interleave_moe_layer_step": 1,
    }
    mixture_class = WeightedInputs
    has_chunks = True
    renamed_parts = {
        ".feed_forward.": ".mlp.",
        ".router.": ".gate.",
        ".shared_expert.": ".shared_experts.",
        ".experts.gate_up_proj": ".experts.gate_up_proj_weight",  # see JointLinear
        ".experts.down_proj": ".experts.down_proj_weight",
    }

    @staticmethod
    def read_facts(values: Fields) -> Fields:
        """Raises ValueError naming a field."""
        for name, check_value in CHECKS.items():
            check_value(values[name], name)
        num_layers, chunk = values["num_hidden_layers"], values["attention_chunk_size"]
        rotates, step = rotating_layers(values), values["interleave_moe_layer_step"]
        kinds = [CHUNKED if each and chunk else FULL for each in rotates]
        given = values.get("layer_types", kinds)
        check(given == kinds, f"layer_types must be {CHUNKED!r} where layers rotate, else {FULL!r}", given)
        experts = values.get("moe_layers", [*range(step - 1, num_layers, step)])
        check(isinstance(experts, list), "moe_layers must be a list", experts)
        return {
            "windows": tuple((chunk or MAX_SIZE) if each else 0 for each in rotates),
            "intermediate_size": values["intermediate_size_mlp"],
            "moe_intermediate_size": values["intermediate_size"],
            "shared_expert_intermediate_size": values["intermediate_size"],
            "has_shared_gate": False,
            "mlp_only_layers": [i for i in range(num_layers) if i not in experts],
            "is_stored_together": not values.get("quantization_config"),
            "attn_scale": values["attn_scale"] if values["attn_temperature_tuning"] else 0.0,
            "floor_scale": values["floor_scale"],
        }

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        facts, amplitude = config.facts, config.rope_parameters["amplitude"]
        check(amplitude == 1, "Llama 4 needs rotations that change no length, not by a factor", amplitude)
        # All of a head is rotated, but files turn neighbours against each other.
        self.order = torch.arange(config.head_dim, device="cpu").view(-1, 2).T.flatten()
        positions = torch.arange(1, config.max_model_len + 1, dtype=torch.float32)
        temperatures = 1.0 + facts["attn_scale"] * (positions / facts["floor_scale"]).floor().log1p()
        for window, layer in zip(config.windows, self.model.layers, strict=False):
            attention = layer.self_attn
            if not window:
                attention = layer.self_attn = WithoutPositions(config, attention.rotary_emb)
                attention.register_buffer("temperatures", temperatures, persistent=False)
                attention.q_norm = attention.k_norm = None
            elif config.use_qk_norm:  # the norms' weights stay 1
                attention.q_norm.weight.weight_loader = attention.k_norm.weight.weight_loader = None
