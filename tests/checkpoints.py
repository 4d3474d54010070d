"""Small random checkpoints, made with transformers, which is also the oracle they are compared with."""

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ARCHITECTURES = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}

SMALL = dict(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A byte-level tokenizer: ids 0..255 are the bytes, 256 is <|end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return fast


def make_config(architecture: str = "qwen3", **overrides) -> transformers.PretrainedConfig:
    return getattr(transformers, ARCHITECTURES[architecture] + "Config")(**{**SMALL, **overrides})


def make_checkpoint(
    folder: Path, architecture: str = "qwen3", seed: int = 0, tokenizer: bool = True, shard_size="5GB", **overrides
) -> Path:
    """Write a float32 checkpoint whose logits are far enough apart for greedy tokens to be stable."""
    torch.manual_seed(seed)
    config = make_config(architecture, **overrides)
    model = getattr(transformers, ARCHITECTURES[architecture] + "ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder, max_shard_size=shard_size)
    if tokenizer:
        make_tokenizer().save_pretrained(folder)
    return Path(folder)


def load_reference(folder: Path, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def reference_greedy(model, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation by transformers, ignoring any end-of-sequence token."""
    ids, past, output = torch.tensor([prompt]), None, []
    for _ in range(count):
        result = model(input_ids=ids, past_key_values=past, use_cache=True)
        past, token = result.past_key_values, int(result.logits[0, -1].argmax())
        output.append(token)
        ids = torch.tensor([[token]])
    return output
