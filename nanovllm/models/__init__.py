"""
The models that the engine runs. A new one is a file here, an entry in `MODELS`, and one in `ARCHITECTURES` of
checkpoints/model_config.py.
"""

from torch import nn

from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.qwen2 import Qwen2ForCausalLM
from nanovllm.models.qwen3 import Qwen3ForCausalLM

MODELS = {model.__name__: model for model in (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)}


def get_model_class(config: ModelConfig) -> type[nn.Module]:
    """The class of the first known architecture that the checkpoint names."""
    return MODELS[config.architectures[0]]
