"""Mistral: Llama without biases, all of whose layers may attend to a window of tokens only."""

from nanovllm.extensions.models.facts import Facts
from nanovllm.extensions.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    pass


FACTS = Facts(MistralForCausalLM, "mistral", {"sliding_window": 4096})
