"""Small random checkpoints, made with transformers, which is also the oracle they are compared with."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nanovllm.checkpoints.model_config import ModelConfig

ARCHITECTURES = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama", "mistral": "Mistral"}
ARCHITECTURES |= {"qwen3_moe": "Qwen3Moe", "gemma3": "Gemma3", "gpt_oss": "GptOss"}
ARCHITECTURES |= {"qwen2_moe": "Qwen2Moe", "glm4_moe": "Glm4Moe", "smollm3": "SmolLM3"}

# The engine options under which results are compared: the same everywhere.
EXACT = dict(device="cpu", dtype="float32", kvcache_block_size=16)

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

# Sizes whose rows in bfloat16 are no multiple of 16 bytes, in one product each.
UNALIGNED = {
    "hidden size": dict(hidden_size=60),
    "heads x head_dim": dict(num_attention_heads=3, num_key_value_heads=1, head_dim=20),
    "intermediate size": dict(intermediate_size=100),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """
    For modules that import it. Matrices this small gain nothing from a second thread, and wait long for it
    when the machine is busy.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


# What an architecture has besides.
OWN = {"mistral": dict(sliding_window=None, head_dim=16)}
OWN["gemma3"] = dict(sliding_window=24, sliding_window_pattern=2, head_dim=16, query_pre_attn_scalar=24)
OWN["qwen3_moe"] = dict(
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=True, mlp_only_layers=[]
)
OWN["qwen2_moe"] = OWN["qwen3_moe"] | dict(shared_expert_intermediate_size=64)
OWN["glm4_moe"] = dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32)

OWN["gpt_oss"] = dict(
    num_local_experts=4, num_experts_per_tok=2, intermediate_size=64, head_dim=16, sliding_window=24
)


def make_config(architecture: str = "qwen3", **overrides) -> transformers.PretrainedConfig:
    settings = {**SMALL, **OWN.get(architecture, {}), **overrides}
    name = "Gemma3TextConfig" if architecture == "gemma3" else ARCHITECTURES[architecture] + "Config"
    return getattr(transformers, name)(**settings)


def read_config(config: transformers.PretrainedConfig, **changes) -> ModelConfig:
    """What the engine makes of a config.json that transformers writes, with some fields changed."""
    from nanovllm import assembly

    architecture = type(config).__name__.removesuffix("Config").removesuffix("Text") + "ForCausalLM"
    return assembly.read_config("a test", config.to_dict() | {"architectures": [architecture]} | changes)


def make_checkpoint(
    folder: Path,
    architecture: str = "qwen3",
    seed: int = 0,
    tokenizer: bool = True,
    shard_size="5GB",
    **overrides,
) -> Path:
    """Write a float32 checkpoint whose logits are far enough apart for greedy tokens to be stable."""
    torch.manual_seed(seed)
    config = make_config(architecture, **overrides)
    model = getattr(transformers, ARCHITECTURES[architecture] + "ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5).sub_(int(architecture == "gemma3"))  # which adds 1
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):  # of routers
                buffer.normal_(0, 0.3)
    model.save_pretrained(folder, max_shard_size=shard_size)
    if tokenizer:
        make_tokenizer().save_pretrained(folder)
    return Path(folder)


def load_reference(folder: Path, dtype=torch.float32):
    # With torch's attention older versions of transformers leave the softcap of scores out without a word.
    softcap = getattr(transformers.AutoConfig.from_pretrained(folder), "attn_logit_softcapping", None)
    options = {"attn_implementation": "eager"} if softcap else {}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


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


@torch.no_grad()
def assert_greedy(model, prompt: list[int], completion: list[int], eos: tuple[int, ...] = ()) -> torch.Tensor:
    """
    Every token of `completion` is the one that transformers ranks first after the tokens before it. By
    induction this is greedy decoding, in one forward pass. Only where transformers itself sees a tie may
    either be taken. Returns the logits of all tokens.
    """
    all_logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0]
    logits = all_logits[len(prompt) - 1 : -1]
    behind = logits.amax(-1) - logits.gather(1, torch.tensor(completion)[:, None])[:, 0]
    wrong = (behind > 1e-4).nonzero().flatten().tolist()
    assert not wrong, f"token {wrong[0]} of the completion is {behind[wrong[0]]:.4f} behind the best"
    assert not set(completion[:-1]) & set(eos), "went on after an end-of-sequence token"
    return all_logits


def edit_json(file: Path, **changes) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(file.read_text()) if file.exists() else {}
    content = {key: value for key, value in {**content, **changes}.items() if value is not None}
    file.write_text(json.dumps(content))


def spell_rope(folder: Path, spelling: str) -> None:
    """
    Rewrite the rotary settings of config.json the way that transformers 5 ("rope_parameters"), 4.56
    ("rope_scaling") or older versions ("type") write them.
    """
    config = json.loads((folder / "config.json").read_text())
    settings = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    if "sliding_attention" in settings:  # by kind of layer
        if spelling == "rope_parameters":
            return
        edit_json(folder / "config.json", rope_local_base_freq=settings["sliding_attention"]["rope_theta"])
        settings = settings["full_attention"]
    theta = settings.pop("rope_theta", None) or config.get("rope_theta", 10000.0)
    rope_type = settings.pop("rope_type", "default")
    if "partial_rotary_factor" in settings:
        edit_json(folder / "config.json", partial_rotary_factor=settings.pop("partial_rotary_factor"))
    if spelling == "rope_parameters":
        new = dict(rope_parameters={"rope_type": rope_type, "rope_theta": theta, **settings})
        edit_json(folder / "config.json", rope_theta=None, rope_scaling=None, **new)
    else:
        key = "type" if spelling == "type" else "rope_type"
        scaling = None if rope_type == "default" else {key: rope_type, **settings}
        edit_json(folder / "config.json", rope_parameters=None, rope_theta=theta, rope_scaling=scaling)
