"""Random JSON schemas, and a random model that is to answer each with a value that fits.

`python tests/long/structured_schemas.py --count 2000 --seed 0`. The model has random weights and knows
nothing of JSON: whatever makes its answers valid are the masks. Every answer that ended by itself must parse
and fit its schema, as jsonschema judges it.
"""

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import paths  # noqa: F401
import torch

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from tiny_checkpoints import EXACT, make_checkpoint, make_tokenizer

CHECKPOINT = dict(vocab_size=257, num_hidden_layers=1, max_position_embeddings=512, seed=1)
PATTERNS = [
    "^[A-Z][a-z]{1,8}$",
    "^[0-9]{3}-[0-9]{4}$",
    "[xy]",
    "^(foo|bar)+$",
    "^\\d+(\\.\\d{1,2})?$",
    "^é?ö*$",
]
NAMES = ["name", "age", "tags", "x", "y y", 'say "hi"', "größe", "😀", "a/b", "$id_"]
CONSTANTS = [None, True, 0, -3, 2.5, "", "a", 'quo"te', "naïve\n", [], [1, "b"], {}, {"k": [None]}]
# Makes a random model end its texts: the characters that end strings, arrays and objects.
ENDINGS = dict(zip(make_tokenizer().convert_tokens_to_ids(list('"]}')), (4.0, 3.0, 3.0), strict=True))


def random_schema(pick: random.Random, depth: int = 0) -> dict[str, Any]:
    """Of the kinds that people write: nested, with enums, ranges, patterns, optional and unknown fields."""
    leaves = [string, integer, number, choice]
    return pick.choice(leaves if depth == 3 else [*leaves, array, record, record, either])(pick, depth)


def string(pick: random.Random, _depth: int) -> dict[str, Any]:
    low = pick.randint(0, 3)
    kinds = [
        {},
        {"pattern": pick.choice(PATTERNS)},
        {"minLength": low, "maxLength": low + pick.randint(0, 8)},
    ]
    kinds += [{"format": pick.choice(["ipv4", "uuid"])}]
    return {"type": "string", **pick.choice(kinds)}


def integer(pick: random.Random, _depth: int) -> dict[str, Any]:
    low = pick.randint(-500, 500)
    kinds = [{}, {"minimum": low, "maximum": low + pick.randint(0, 2000)}, {"exclusiveMinimum": low}]
    kinds += [{"multipleOf": pick.randint(1, 9)}]
    return {"type": "integer", **pick.choice(kinds)}


def number(pick: random.Random, _depth: int) -> dict[str, Any]:
    low = pick.randint(-5000, 5000) / 100
    # Not exclusiveMaximum: a number of many digits just below it becomes it where it is read as a float.
    return {"type": "number", **pick.choice([{}, {"minimum": low, "maximum": low + 3}])}


def choice(pick: random.Random, _depth: int) -> dict[str, Any]:
    if pick.random() < 0.3:
        return pick.choice([{"const": pick.choice(CONSTANTS)}, {"type": pick.choice(["boolean", "null"])}])
    return {"enum": pick.sample(CONSTANTS, pick.randint(1, 5))}


def array(pick: random.Random, depth: int) -> dict[str, Any]:
    low = pick.randint(0, 2)
    schema = {"type": "array", "items": random_schema(pick, depth + 1), "minItems": low}
    if pick.random() < 0.3:
        schema["prefixItems"] = [random_schema(pick, depth + 1)]
    return schema | ({"maxItems": low + pick.randint(1, 4)} if pick.random() < 0.7 else {})


def record(pick: random.Random, depth: int) -> dict[str, Any]:
    names = pick.sample(NAMES, pick.randint(0, 4))
    others = pick.choice([False, False, True, {"type": "integer"}])
    return {
        "type": "object",
        "properties": {name: random_schema(pick, depth + 1) for name in names},
        "required": [name for name in names if pick.random() < 0.6],
        "additionalProperties": others,
    }


def either(pick: random.Random, depth: int) -> dict[str, Any]:
    if pick.random() < 0.3:  # a list of linked nodes
        link = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
        node = {"type": "object", "properties": {"next": link}, "required": ["next"]}
        return {"$ref": "#/$defs/node", "$defs": {"node": node}} if depth == 0 else {"type": "null"}
    return {"anyOf": [random_schema(pick, depth + 1) for _ in range(pick.randint(1, 3))]}


def run(llm: LLM, count: int, seed: int) -> Counter:
    """How many answers ended in which way."""
    pick, counts, requests = random.Random(seed), Counter(), []
    schemas = [random_schema(pick) for _ in range(count)]
    for number, schema in enumerate(schemas):
        wanted = StructuredOutputsParams(json=schema, disable_any_whitespace=pick.random() < 0.7)
        settings = pick.choice([{}, {"top_p": 0.9}, {"presence_penalty": 0.3}, {"n": 2}, {"min_tokens": 3}])
        settings |= dict(temperature=pick.choice([0.7, 1.0]), seed=number, logit_bias=ENDINGS)
        params = SamplingParams(max_tokens=300, structured_outputs=wanted, **settings)
        prompt = "".join(pick.choices("abc{[ ", k=pick.randint(1, 9)))
        requests.append((prompt, params))
    for index, result in llm.generate_from(requests):
        for output in result.get("outputs", [result]):
            counts[output["finish_reason"]] += 1
            if output["finish_reason"] == "stop":
                try:
                    jsonschema.validate(json.loads(output["text"]), schemas[index])
                except (ValueError, jsonschema.ValidationError) as error:
                    raise AssertionError(f"{output['text']!r} does not fit {schemas[index]}") from error
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        with LLM(str(make_checkpoint(Path(folder), **CHECKPOINT)), **EXACT, num_kvcache_blocks=2000) as llm:
            counts = run(llm, args.count, args.seed)
    seconds = time.perf_counter() - start
    print(f"{args.count:,} schemas in {seconds:,.0f} s: {dict(counts)}; all that ended by themselves fit")


if __name__ == "__main__":
    main()
