"""
The models that checkpoints can name in `architectures`. A new one is a file here and an entry in `MODELS`.
"""

from typing import Any

from torch import nn

from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.qwen2 import Qwen2ForCausalLM
from nanovllm.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[nn.Module]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def get_model_class(hf_config: Any) -> type[nn.Module]:
    """
    The class for a checkpoint. Raises ValueError that lists the known architectures, or names what is not
    supported.
    """
    names = getattr(hf_config, "architectures", None) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        names = [str(names)]
    known = [name for name in names if name in MODELS]
    if not known:
        raise ValueError(
            f"architecture {', '.join(names) or 'none'} is not known; known ones: {', '.join(MODELS)}"
        )
    if getattr(hf_config, "quantization_config", None):
        raise ValueError("quantized safetensors checkpoints (quantization_config) are not supported")
    if getattr(hf_config, "hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act must be 'silu', got {hf_config.hidden_act!r}")
    if getattr(hf_config, "use_sliding_window", False):
        raise ValueError("checkpoints with use_sliding_window=true are not supported")
    layer_types = getattr(hf_config, "layer_types", None) or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise ValueError(f"layer_types must all be 'full_attention', got {layer_types!r:.100}")
    return MODELS[known[0]]
