"""Mistral: Llama, all of whose layers may attend to a window of tokens only."""

from nanovllm.extensions.models import llama
from nanovllm.extensions.models.facts import Facts

DEFAULTS = llama.DEFAULTS | {"sliding_window": 4096}
FACTS = Facts("MistralForCausalLM", "mistral", DEFAULTS, llama.VARIANT)
