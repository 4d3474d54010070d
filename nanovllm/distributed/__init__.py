"""Several ranks, and what scripts for vLLM import from here."""

from nanovllm.extensions.api.cleanup import cleanup_dist_env_and_memory

__all__ = ["cleanup_dist_env_and_memory"]
