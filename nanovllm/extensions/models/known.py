"""All models of this folder, by their architecture's name."""

from nanovllm.extensions.models import gemma3, gpt_oss, llama, mistral, qwen2, qwen3, qwen3_moe

FILES = llama, mistral, qwen2, qwen3, qwen3_moe, gemma3, gpt_oss
MODELS = {file.FACTS.architecture: file.FACTS for file in FILES}
