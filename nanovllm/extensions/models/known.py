"""All models of this folder, by their architecture's name."""

from torch import nn

from nanovllm.extensions.models import (
    exaone,
    gemma3,
    glm4_moe,
    gpt_oss,
    llama,
    llama4,
    mistral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
)
from nanovllm.extensions.models.config import Fields
from nanovllm.extensions.models.gguf import BY_TRANSFORMERS, GGUFModel

CLASSES = (
    llama.LlamaForCausalLM,
    smollm3.SmolLM3ForCausalLM,
    exaone.ExaoneForCausalLM,
    mistral.MistralForCausalLM,
    qwen2.Qwen2ForCausalLM,
    qwen2_moe.Qwen2MoeForCausalLM,
    qwen3.Qwen3ForCausalLM,
    qwen3_moe.Qwen3MoeForCausalLM,
    gemma3.Gemma3ForCausalLM,
    gpt_oss.GptOssForCausalLM,
    glm4_moe.Glm4MoeForCausalLM,
    llama4.Llama4ForCausalLM,
)
MODELS = {model.__name__: model for model in CLASSES}


def gguf_models() -> list[GGUFModel]:
    """Those that GGUF files may hold."""
    return [model.gguf for model in MODELS.values() if model.gguf] + [*BY_TRANSFORMERS]


def register_model(architecture: str, model: type[nn.Module], defaults: Fields | None = None) -> None:
    """
    Have checkpoints whose config.json names this architecture built by `model`, a class with
    `packed_modules_mapping`, `forward(input_ids, positions)` and `compute_logits(hidden_states)` that is made
    from a DecoderConfig. `defaults` are for fields that a file may leave out. Every rank must call it, as the
    module of an extension does when it is imported.
    """
    own = {"model_type": "", "gguf": None, "defaults": defaults or {}}
    MODELS[architecture] = type(architecture, (model,), own)
