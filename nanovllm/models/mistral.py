"""Mistral without a sliding window: Llama without biases."""

from nanovllm.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    pass
