"""The model of the core, Qwen3, and what is done with every model once its weights are loaded."""

from torch import nn


def pack_weights(model: nn.Module) -> None:
    """Bring the weights into the layouts that multiply fastest on their device."""
    for module in model.modules():
        if hasattr(module, "finish"):
            module.finish()
