"""The model of the core, Qwen3."""
