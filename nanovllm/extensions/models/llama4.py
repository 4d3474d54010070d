"""Llama 4, the part of it that reads text: experts whose inputs are weighted, beside an MLP for all tokens.

Most layers attend in chunks. The others know no positions: they rotate nothing and see everything before a
token, with scores that grow a little with its position.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoints.model_config import check_size
from nanovllm.extensions.experts.kernels.moe import run_experts
from nanovllm.extensions.experts.kernels.router import Chosen
from nanovllm.extensions.experts.moe import MixtureOfExperts
from nanovllm.extensions.models.decoder import DecoderConfig
from nanovllm.extensions.models.partial_rotation import PartlyRotated
from nanovllm.extensions.models.rope import FULL, Fields
from nanovllm.layers.layernorm import RMSNorm, Stream
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer
from nanovllm.utils.context import get_context
from nanovllm.utils.validation import check, number

CHUNKED = "chunked_attention"
SIZES = "intermediate_size_mlp interleave_moe_layer_step no_rope_layer_interval".split()
# What files call the modules of a layer, and the core does.
NAMES = {".feed_forward.": ".mlp.", ".router.": ".gate.", ".shared_expert.": ".shared_experts."}


class Llama4Attention(Qwen3Attention):
    """
    `temperatures`, float32 [positions], are what queries are multiplied by. None: the layer rotates instead.
    """

    def __init__(self, config: DecoderConfig, rotary_emb: RotaryEmbedding):
        super().__init__(config, rotary_emb)
        self.register_buffer("temperatures", None, persistent=False)

    def attend(self, positions: Tensor, qkv: Tensor) -> Tensor:
        if self.temperatures is not None:
            queries = qkv[:, : self.qkv_proj.shards["q"].size[0]]
            queries *= self.temperatures[positions, None]
            positions = torch.zeros_like(positions)  # where all angles are 0
        return super().attend(positions, qkv)


class Llama4DecoderLayer(Qwen3DecoderLayer):
    def __init__(self, config: DecoderConfig, rotary_emb: RotaryEmbedding):
        super().__init__(config, rotary_emb)
        self.self_attn = Llama4Attention(config, rotary_emb)


class Llama4MoE(MixtureOfExperts):
    """A token is multiplied by its weights, sigmoids of logits, before its experts compute it."""

    is_stored_together = True

    def forward(self, stream: Stream, next_norm: RMSNorm) -> Stream:
        x = stream.normalised()
        stream = Stream(stream.residual(), stream.norm, x)
        logits = self.gate(stream)
        experts, _ = self.gate.choose(logits)
        weights = logits.gather(1, experts.long()).float().sigmoid().to(x.dtype)
        inputs = x[:, None] * weights[..., None]  # [tokens, top_k, hidden]
        chosen = Chosen(experts.view(-1, 1), torch.ones_like(weights, dtype=torch.float32).view(-1, 1))
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
        "no_rope_layers": [],
        "no_rope_layer_interval": 4,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "num_experts": 16,
        "num_experts_per_tok": 1,
        "n_shared_experts": 1,
        "intermediate_size_mlp": 16384,
        "interleave_moe_layer_step": 1,
        # Which follow from others.
        "moe_intermediate_size": None,
        "mlp_only_layers": None,
        "is_stored_apart": None,
    }
    layer_class = Llama4DecoderLayer
    mixture_class = Llama4MoE
    has_chunks = True

    @staticmethod
    def read_own(values: Fields) -> Fields:
        for name in SIZES:
            check_size(values[name], name)
        number(0, 1e6)(values["attn_scale"], "attn_scale")
        number(1, 1e9)(values["floor_scale"], "floor_scale")
        num_layers, chunk = values["num_hidden_layers"], values["attention_chunk_size"]
        if chunk is not None:
            check_size(chunk, "attention_chunk_size")
        interval, step = values["no_rope_layer_interval"], values["interleave_moe_layer_step"]
        rotates = values["no_rope_layers"] or [(i + 1) % interval > 0 for i in range(num_layers)]
        are_flags = isinstance(rotates, list) and all(each in (0, 1) for each in rotates)
        is_good = are_flags and len(rotates) >= num_layers
        check(is_good, "no_rope_layers must have 0 or 1 for each layer", rotates)
        windows = tuple(chunk if each and chunk else 0 for each in rotates[:num_layers])
        kinds = [CHUNKED if window else FULL for window in windows]
        given = values.get("layer_types", kinds)
        is_good = isinstance(given, list) and given[:num_layers] == kinds
        check(is_good, f"layer_types must be {CHUNKED!r} where layers rotate, else {FULL!r}", given)
        experts = values.get("moe_layers", [*range(step - 1, num_layers, step)])
        check(isinstance(experts, list), "moe_layers must be a list", experts)
        return {
            "windows": windows,
            "intermediate_size": values["intermediate_size_mlp"],
            "moe_intermediate_size": values["intermediate_size"],
            "mlp_only_layers": [i for i in range(num_layers) if i not in experts],
            "is_stored_apart": "quantization_config" in values,
            "own": values | {"no_rope_layers": rotates},
        }

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        own, amplitude = config.own, config.rope_parameters["amplitude"]
        check(amplitude == 1, "Llama 4 needs rotations that change no length, not by a factor", amplitude)
        # All of a head is rotated, but files turn neighbours against each other.
        self.order = torch.arange(config.head_dim, device="cpu").view(-1, 2).T.flatten()
        positions = torch.arange(1, config.max_model_len + 1, dtype=torch.float32)
        temperatures = torch.ones_like(positions)
        if own["attn_temperature_tuning"]:
            temperatures += own["attn_scale"] * (positions / own["floor_scale"]).floor().log1p()
        for rotates, layer in zip(own["no_rope_layers"], self.model.layers, strict=False):
            attention = layer.self_attn
            for norm in filter(None, (attention.q_norm, attention.k_norm)):
                norm.weight.weight_loader = None  # which stays 1
            if not rotates:
                attention.temperatures = temperatures
                attention.q_norm = attention.k_norm = None

    def converted(self, tensors: Iterable[Any], _known: Any) -> Iterator[Any]:
        """A checkpoint's tensors by the core's names."""
        for tensor in map(copy.copy, tensors):
            for theirs, ours in NAMES.items():
                tensor.name = tensor.name.replace(theirs, ours)
            if tensor.name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
                tensor.name += "_weight"  # see JointLinear
            yield tensor
