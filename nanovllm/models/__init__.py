"""
The model of the core, Qwen3. Its relatives are in extensions/models; a new one is a file there and an entry
in `FILES` of assembly.py.
"""

from torch import nn

from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import LinearBase


def pack_weights(model: nn.Module) -> None:
    """Once all weights are loaded: bring them into the layouts that multiply fastest on their device."""
    for module in model.modules():
        if isinstance(module, (LinearBase, ParallelLMHead)):
            module.finish()
