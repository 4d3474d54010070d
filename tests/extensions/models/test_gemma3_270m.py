"""Gemma-3-270M, where its file is there: the tokens of transformers, in windows and beyond them."""

import pytest
import transformers
from gemma3_270m import gemma3_270m_gguf  # noqa: F401  a fixture
from gguf_files import placed
from open_checkpoints import open_checkpoint

from nanovllm import LLM, SamplingParams
from tiny_checkpoints import assert_greedy

WINDOW = 512
# Its published config.json.
SIZES = dict(
    vocab_size=262144,
    hidden_size=640,
    intermediate_size=2048,
    num_hidden_layers=18,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    max_position_embeddings=32768,
    sliding_window=WINDOW,
    query_pre_attn_scalar=256,
    layer_types=[*["sliding_attention"] * 5, "full_attention"] * 3,
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    },
)
PROMPTS = [
    "The capital of France is",
    "In the beginning God created",
    "Q: What is 12 + 30?\nA:",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Die Hauptstadt von Deutschland ist",
    "La liberté, l'égalité et",
    "1, 2, 3, 4, 5,",
    "<h1>Welcome</h1>\n<p>",
    "Water boils at a temperature of",
    "There was a king. " + " ".join(f"His son number {i} was {20 + i} years old." for i in range(52)),
]


@pytest.fixture(scope="module")
def reference(gemma3_270m_gguf):  # noqa: F811
    """transformers' model with the dequantised weights."""
    weights = {tensor.name: tensor[:].contiguous() for tensor in placed(open_checkpoint(gemma3_270m_gguf))}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SIZES))
    model.load_state_dict(weights, assign=True)
    return model.eval()


def test_greedy_tokens_are_those_of_transformers(gemma3_270m_gguf, reference):  # noqa: F811
    cache = dict(kvcache_block_size=16, num_kvcache_blocks=200, max_model_len=2048)
    options = dict(device="cpu", dtype="float32", max_num_batched_tokens=256)
    with LLM(str(gemma3_270m_gguf), **cache, **options) as llm:
        results = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
        prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
        eos = llm.config.eos
    # Both models' weights are read by the same code. Only what the right ones make of them is sense.
    texts = [result["text"] for result in results]
    assert texts[1].startswith(" the heavens and the earth") and texts[6] == " 6, 7, 8, 9, 10,"
    assert texts[9].startswith(" His son number 52 was 72 years old")
    assert len(prompts[9]) > WINDOW + 128
    for prompt, result in zip(prompts, results, strict=True):
        assert_greedy(reference, prompt, result["token_ids"], eos)
