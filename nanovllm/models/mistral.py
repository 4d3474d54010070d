"""Mistral: Llama without biases, all of whose layers may attend to a window of tokens only."""

from nanovllm.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    pass
