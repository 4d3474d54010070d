"""All models of this folder, by their architecture's name."""

from nanovllm.extensions.models import gemma3, gpt_oss, llama, mistral, qwen2, qwen3, qwen3_moe

CLASSES = (
    llama.LlamaForCausalLM,
    mistral.MistralForCausalLM,
    qwen2.Qwen2ForCausalLM,
    qwen3.Qwen3ForCausalLM,
    qwen3_moe.Qwen3MoeForCausalLM,
    gemma3.Gemma3ForCausalLM,
    gpt_oss.GptOssForCausalLM,
)
MODELS = {model.__name__: model for model in CLASSES}
