"""Several ranks, and what scripts for vLLM import from here."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "cleanup_dist_env_and_memory":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nanovllm.extensions.api.cleanup import cleanup_dist_env_and_memory

    return cleanup_dist_env_and_memory
