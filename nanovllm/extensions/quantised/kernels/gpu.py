"""Which instructions a GPU has: kernels of quantised weights need some that not every GPU has."""

import torch

from nanovllm.kernels.runtime import gpu_properties


def gpu_supports(device: torch.device, major: int, minor: int) -> bool:
    """Whether a GPU is NVIDIA's and has the instructions of this compute capability."""
    properties = gpu_properties(device)
    return bool(properties and torch.version.cuda and (properties.major, properties.minor) >= (major, minor))
