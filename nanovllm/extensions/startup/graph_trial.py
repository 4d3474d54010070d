"""Whether decode steps can be recorded as CUDA graphs, where modules from elsewhere are in them."""

import warnings
from collections.abc import Callable
from typing import Any

import torch

from nanovllm.engine.cuda_graphs import CudaGraphs


def can_be_recorded(step: Callable[[], Any], device: torch.device) -> bool:
    """A step that has run before is recorded and thrown away. Warns if that fails."""
    trial = CudaGraphs(device)
    try:
        with torch.cuda.stream(torch.cuda.current_stream(device)):  # a failure may leave another one behind
            trial.capture(step, in_two=False)
    except RuntimeError as error:
        warnings.warn(f"decode steps run without CUDA graphs: {error}", stacklevel=2)
        return False
    return True
