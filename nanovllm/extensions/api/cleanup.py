"""What scripts for vLLM call when they are done with an engine."""

import gc

import torch


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the device's memory that engines left which were deleted; `shutdown_ray` has no effect."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
