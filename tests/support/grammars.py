"""Requests whose answers have to follow grammars."""

from engines import tokens_of

from nanovllm import SamplingParams, StructuredOutputsParams
from tiny_checkpoints import make_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]+$"},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 20}, "maxItems": 3},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
JSON = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
LETTERS = make_tokenizer().convert_tokens_to_ids(list("abc"))
# Requests of every kind, some of which ask for structured outputs.
MIXED = [
    dict(structured_outputs=JSON, n=2),
    dict(),
    dict(structured_outputs=JSON, presence_penalty=0.8, frequency_penalty=0.3, repetition_penalty=1.2),
    dict(structured_outputs=StructuredOutputsParams(regex="([a-z]{2,7} ){2,4}end"), top_p=0.8, top_k=40),
    dict(temperature=0, logprobs=2, max_tokens=30),
    dict(structured_outputs=JSON, stop='","'),
    dict(structured_outputs=StructuredOutputsParams(choice=["yes", "no", "é😀"]), logprobs=1),
    dict(structured_outputs=StructuredOutputsParams(grammar='start: "(" start ")" | "x"'), min_tokens=4),
    dict(structured_outputs=StructuredOutputsParams(regex="a*b"), ignore_eos=True, max_tokens=12),
    dict(structured_outputs=StructuredOutputsParams(regex="[a-c]*"), logit_bias={LETTERS[0]: 3}, min_p=0.05),
    dict(bad_words=["e"], min_tokens=3, max_tokens=20),
]
PARAMS = [
    SamplingParams(**{"max_tokens": 60, "seed": i, **each}) for i, each in enumerate([*MIXED, *MIXED[:3]])
]
PROMPTS = [[i, *range(7 * i % 40)] for i in range(len(PARAMS))]


def assert_same(results: list[dict], expected: list[dict]) -> None:
    assert tokens_of(results) == tokens_of(expected)
    for result, other in zip(results, expected, strict=True):
        outputs, others = (each.get("outputs", [each]) for each in (result, other))
        ends = [
            [(o["text"], o["finish_reason"], o["stop_reason"]) for o in each] for each in (outputs, others)
        ]
        assert ends[0] == ends[1]
