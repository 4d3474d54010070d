"""Copies between host and device that nobody waits for: work that is enqueued later finds them complete."""

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy on the device, for steps that are enqueued from now on."""
    tensor = torch.from_numpy(array).to(dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, complete once the device has done all that is enqueued now."""
    if not tensor.is_cuda:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
