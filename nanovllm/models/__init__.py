"""
The models that the engine runs, each in a file named like its class: Qwen3ForCausalLM is in qwen3.py. A new
one is a file here and an entry in `ARCHITECTURES` of checkpoints/model_config.py.
"""

from importlib import import_module

from torch import nn

from nanovllm.checkpoints.model_config import ModelConfig


def get_model_class(config: ModelConfig) -> type[nn.Module]:
    """The class of the first known architecture that the checkpoint names."""
    name = config.architectures[0]
    file = name.removesuffix("ForCausalLM").lower()
    return getattr(import_module(f"nanovllm.models.{file}"), name)
