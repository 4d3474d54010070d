"""Mistral: Llama, all of whose layers may attend to a window of tokens only."""

from nanovllm.extensions.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    model_type = "mistral"
    defaults = LlamaForCausalLM.defaults | {"sliding_window": 4096}
    gguf = None
