"""Copies to a device that nobody waits for: work that is enqueued later finds them complete."""

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy on the device, for steps that are enqueued from now on."""
    tensor = torch.from_numpy(array).to(dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
