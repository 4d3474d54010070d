"""How much of a device's memory a step takes and how much is left, and what to say when it runs out."""

import functools
import traceback
from collections.abc import Callable
from typing import Any

import torch

CPU_KV_CACHE_BYTES = 4 << 30


def bytes_taken_by(step: Callable[[], Any], device: torch.device) -> int:
    """Bytes that torch has to take from the GPU for this."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.max_memory_reserved(device) - before


def bytes_left(device: torch.device, share: float) -> int:
    """Of this share of the card's memory, what nobody uses."""
    if device.type != "cuda":
        return CPU_KV_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return int(total * share) - (total - free)


def explain_memory(method):
    """When memory runs out in this method of something with a `config`, say what can be done about it."""

    @functools.wraps(method)
    def explained(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # else the step's tensors live as long as the error
            config = self.config
            raise torch.OutOfMemoryError(
                f"{error} What helps: lower gpu_memory_utilization (now {config.gpu_memory_utilization}), "
                f"max_num_seqs (now {config.max_num_seqs}) or max_num_batched_tokens (now "
                f"{config.max_num_batched_tokens}), or raise tensor_parallel_size (now "
                f"{config.tensor_parallel_size})"
            ) from error

    return explained
