"""What to say when the memory of a device runs out, in a step or while the engine starts."""

import traceback

import torch

from nanovllm.config import Config
from nanovllm.engine.interfaces import Observer


class MemoryHint(Observer):
    """Every rank has one."""

    def __init__(self, config: Config):
        self._config = config

    def failing(self, error: BaseException) -> None:
        """Say which options help."""
        if not isinstance(error, torch.OutOfMemoryError):
            return
        traceback.clear_frames(error.__traceback__)  # else the step's tensors live as long as the error
        config = self._config
        raise torch.OutOfMemoryError(
            f"{error} What helps: lower gpu_memory_utilization (now {config.gpu_memory_utilization}), "
            f"max_num_seqs (now {config.max_num_seqs}) or max_num_batched_tokens (now "
            f"{config.max_num_batched_tokens}), or raise tensor_parallel_size (now "
            f"{config.tensor_parallel_size})"
        ) from error
