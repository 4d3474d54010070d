"""
The models that the engine runs. A new one is a file here, an entry in `MODELS`, and one in `ARCHITECTURES` of
checkpoints/model_config.py.
"""

from torch import nn

from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import LinearBase, assign_formats, without_formats
from nanovllm.layers.quantization import read_scheme
from nanovllm.models.gemma3 import Gemma3ForCausalLM
from nanovllm.models.gpt_oss import GptOssForCausalLM
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.mistral import MistralForCausalLM
from nanovllm.models.qwen2 import Qwen2ForCausalLM
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.models.qwen3_moe import Qwen3MoeForCausalLM
from nanovllm.models.transformers_model import TransformersForCausalLM

CLASSES = LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM
CLASSES += Gemma3ForCausalLM, GptOssForCausalLM
MODELS = {model.__name__: model for model in CLASSES}


def get_model_class(config: ModelConfig) -> type[nn.Module]:
    """The class of the first known architecture that the checkpoint names, or that for all others."""
    return MODELS[config.architectures[0]] if config.architectures else TransformersForCausalLM


def build_model(config: ModelConfig, quantization: str | None = None) -> nn.Module:
    """
    The model, with memory for its weights in the format that the checkpoint or this option of the engine asks
    for. Raises ValueError if that is not supported.
    """
    scheme = read_scheme(config.quantization_config, quantization)
    with without_formats():
        model = get_model_class(config)(config)
    stacked = [name for name, param in model.named_parameters() if param.dim() > 2]  # by transformers
    if scheme is not None and stacked:
        raise ValueError(f"{stacked[0]} cannot be quantised, as experts can only in classes of this project")
    assign_formats(model, scheme)
    return model


def pack_weights(model: nn.Module) -> None:
    """Once all weights are loaded: bring them into the layouts that multiply fastest on their device."""
    for module in model.modules():
        if isinstance(module, (LinearBase, ParallelLMHead)):
            module.pack()
