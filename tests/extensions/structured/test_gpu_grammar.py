"""Structured outputs on a GPU: masks between two CUDA graphs, made while the forward pass runs."""

import json

import jsonschema
import pytest
from gpu_checks import MODES
from grammars import MIXED, PARAMS, PROMPTS, SCHEMA, assert_same
from structured_schemas import ENDINGS

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from tiny_checkpoints import make_checkpoint

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    sizes = dict(hidden_size=128, head_dim=64, num_attention_heads=8, num_key_value_heads=2)
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=4, **sizes))


@pytest.fixture(scope="module")
def plain(checkpoint) -> list[dict]:
    """The mixed requests in the plain loop and without graphs."""
    return run(checkpoint, False, enforce_eager=True)


def run(checkpoint: str, overlap: bool, **options) -> list[dict]:
    with LLM(checkpoint, **options) as llm:
        llm._overlap = overlap
        return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
@pytest.mark.usefixtures("no_forecast")
def test_mixed_requests_draw_the_same_tokens_in_every_mode(checkpoint, plain, options):
    assert_same(run(checkpoint, True, **options), plain)


def test_requests_without_a_grammar_draw_what_they_draw_alone(checkpoint, plain):
    free = [i for i in range(len(PARAMS)) if "structured_outputs" not in MIXED[i % len(MIXED)]]
    with LLM(checkpoint) as llm:
        alone = [llm.generate([PROMPTS[i]], PARAMS[i], use_tqdm=False)[0] for i in free]
    assert_same(alone, [plain[i] for i in free])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whatever_ended_by_itself_fits_its_schema_in_batches_of_all_sizes(checkpoint, dtype):
    wanted = StructuredOutputsParams(json=SCHEMA)
    kinds = [{}, dict(top_p=0.9), dict(logprobs=1), dict(frequency_penalty=0.5), dict(top_k=3, min_tokens=5)]
    params = [
        SamplingParams(
            max_tokens=20 + i, seed=i, structured_outputs=wanted, logit_bias=ENDINGS, **kinds[i % 5]
        )
        for i in range(200)
    ]
    with LLM(checkpoint, dtype=dtype, max_num_seqs=160) as llm:
        results = llm.generate([[i % 320] for i in range(200)], params, use_tqdm=False)
    ended = [result["text"] for result in results if result["finish_reason"] == "stop"]
    assert len(ended) > 50
    for text in ended:
        jsonschema.validate(json.loads(text), SCHEMA)
