"""Mistral: Llama without biases. Within its sliding window, if there is one, it attends to everything."""

from nanovllm.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    pass
