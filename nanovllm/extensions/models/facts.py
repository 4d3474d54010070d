"""What is to be known of a model besides its layers: how its files call it, and what they leave unsaid."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

Fields = dict[str, Any]  # of config.json

# Of mixtures of experts.
EXPERTS = {"num_experts": 128, "decoder_sparse_step": 1, "mlp_only_layers": []}
# Of Qwen's files, which may have a window but do not use it.
QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
# llama.cpp's names of a layer's modules, and Hugging Face's.
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def no_fields(raw: Fields, number: Callable[..., Any]) -> Fields:
    return {}


@dataclass(frozen=True)
class GGUFFacts:
    """
    How GGUF files have a model: its name there, and by llama.cpp's names the `modules` of a layer. Some have
    query and key projections in the order in which llama.cpp rotates them, neighbouring rows against each
    other, and weights of norms that something was added to. `read_fields(raw, number)` gives fields besides
    `raw`, those of all models; number(key, default, kind) is what the file has there, or a ValueError that
    names the key.
    """

    architecture: str
    modules: dict[str, str] = field(default_factory=lambda: LAYER_MODULES)
    rotates_neighbours: bool = False
    added_to_norms: float = 0.0
    read_fields: Callable[..., Fields] = no_fields


@dataclass(frozen=True)
class Facts:
    """
    `model_type` as in config.json. `defaults` are fields that a file may leave out, as far as they are not
    those of all models; which there are says what files of this model may ask for at all.
    """

    model: type[nn.Module]
    model_type: str
    defaults: Fields = field(default_factory=dict)
    gguf: GGUFFacts | None = None  # if such files can be read
