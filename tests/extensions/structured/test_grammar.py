"""Structured outputs: completions that look as their requests say, whatever else the requests ask for, and
however the engine runs them.

The model has random weights: without masks none of its completions would have any form.
"""

import asyncio
import json
import re
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jsonschema
import numpy as np
import pytest
from engines import assert_empty
from forked_ranks import forked_ranks  # noqa: F401
from grammars import JSON, LETTERS, PARAMS, PROMPTS, SCHEMA, assert_same
from smollm2 import smollm2_gguf  # noqa: F401
from structured_schemas import CHECKPOINT, ENDINGS, run

from nanovllm import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from nanovllm.extensions.structured.bitmask import BitmaskProcessor, GrammarError
from nanovllm.extensions.structured.grammar import Compiler
from nanovllm.extensions.structured.matchers import MAX_LEXERS, CompiledGrammar
from tiny_checkpoints import EXACT, edit_json, make_checkpoint, make_tokenizer, one_thread  # noqa: F401

END = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), **CHECKPOINT))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **EXACT, num_kvcache_blocks=400) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm) -> list[dict]:
    """The results of the mixed requests, each run by itself."""
    pairs = zip(PROMPTS, PARAMS, strict=True)
    return [llm.generate([prompt], params, use_tqdm=False)[0] for prompt, params in pairs]


def masks_of(llm: LLM) -> BitmaskProcessor:
    return llm.parts.logits_processor("bitmask")


def compiler_of(llm: LLM) -> Compiler:
    return masks_of(llm).compiler


def waiting(llm: LLM, wanted: int) -> bool:
    """Whether a batch with these logits processors waits for masks."""
    return bool(wanted & llm.model_runner.waiting)


def answer(llm: LLM, wanted: StructuredOutputsParams, **settings) -> dict:
    params = SamplingParams(**{"max_tokens": 200, "seed": 5, "structured_outputs": wanted, **settings})
    return llm.generate("Say: ", params, use_tqdm=False)[0]


# --- what a completion looks like ---


def test_a_completion_fits_its_regular_expression_as_a_whole(llm):
    texts = {answer(llm, StructuredOutputsParams(regex="[a-c]{3}-[0-9]+"), seed=i)["text"] for i in range(8)}
    assert len(texts) == 8 and all(re.fullmatch("[a-c]{3}-[0-9]+", text) for text in texts)


def test_a_completion_is_one_of_the_choices(llm):
    texts = ["yes", "yesterday", 'a "quoted"\nline', "é😀"]
    found = {answer(llm, StructuredOutputsParams(choice=texts), seed=i)["text"] for i in range(40)}
    assert found == set(texts)


@pytest.mark.parametrize("grammar", ['start: "(" start ")" | "x"', 'root ::= "(" root ")" | "x"'])
def test_a_completion_belongs_to_a_grammar_of_lark_or_gbnf(llm, grammar):
    found = {answer(llm, StructuredOutputsParams(grammar=grammar), seed=i)["text"] for i in range(8)}
    assert found == {"(" * depth + "x" + ")" * depth for depth in map(len, (f.split("x")[0] for f in found))}
    assert len(found) > 2


def test_a_completion_is_a_json_object(llm):
    for seed in range(4):
        result = answer(llm, StructuredOutputsParams(json_object=True), seed=seed, logit_bias=ENDINGS)
        assert isinstance(json.loads(result["text"]), dict)


class Cat:
    """Stands for a pydantic model, of which nothing but its schema is asked."""

    @staticmethod
    def model_json_schema() -> dict:
        return SCHEMA


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA), Cat], ids=["dict", "text", "model"])
def test_a_completion_fits_its_schema_and_ends_there(llm, schema):
    result = answer(llm, StructuredOutputsParams(json=schema), logit_bias=ENDINGS)
    jsonschema.validate(json.loads(result["text"]), SCHEMA)
    assert result["finish_reason"] == "stop" and result["token_ids"][-1] == END


def test_a_pydantic_model_is_a_schema(llm):
    pydantic = pytest.importorskip("pydantic")

    class Car(pydantic.BaseModel):
        brand: str = pydantic.Field(max_length=9)
        kind: Literal["sedan", "SUV"]
        year: int = pydantic.Field(ge=1990, le=2030)

    for seed in range(3):
        result = answer(llm, StructuredOutputsParams(json=Car), seed=seed, logit_bias=ENDINGS)
        Car.model_validate_json(result["text"])


def test_a_real_model_reads_a_sentence_into_json(smollm2_gguf):  # noqa: F811
    properties = {"city": {"type": "string", "maxLength": 20}, "in_europe": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    wanted = StructuredOutputsParams(
        json={**schema, "additionalProperties": False}, disable_any_whitespace=True
    )
    prompt = "Paris is the capital of France. The city of this sentence as JSON:\n"
    with LLM(str(smollm2_gguf), device="cpu", num_kvcache_blocks=4) as llm:
        [result] = llm.generate(prompt, SamplingParams(0, 40, structured_outputs=wanted), use_tqdm=False)
    assert json.loads(result["text"])["city"] == "Paris"


def test_random_schemas_get_answers_that_fit(llm):
    assert run(llm, 60, seed=0)["stop"] > 60


def test_max_tokens_may_end_a_completion_in_the_middle(llm):
    result = answer(llm, JSON, max_tokens=5)
    assert (result["finish_reason"], len(result["token_ids"])) == ("length", 5)


def test_after_the_end_of_its_text_a_completion_that_ignores_it_has_nothing_but_ends(llm):
    result = answer(llm, StructuredOutputsParams(regex="ab"), max_tokens=9, ignore_eos=True)
    assert result["text"] == "ab" and result["token_ids"][2:] == [END] * 7


def test_whatever_is_banned_or_asked_for_the_text_stays_as_wanted(llm):
    wanted = StructuredOutputsParams(regex="ab|ba")
    settings = [{"bad_words": ["a", "b"]}, {"min_tokens": 20}, {"logit_bias": dict.fromkeys(LETTERS, -100)}]
    for each in settings:
        assert answer(llm, wanted, **each)["text"] in ("ab", "ba")


@pytest.mark.parametrize("settings", [{}, {"top_k": 2}], ids=["all", "filtered"])
def test_log_probabilities_are_the_models_own_before_the_mask(llm, settings):
    wanted = StructuredOutputsParams(regex="[xyz]{8}")
    params = SamplingParams(1, 8, logprobs=0, structured_outputs=wanted, **settings)
    [result] = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    [scores] = llm.score([[1, 2, 3, *result["token_ids"]]], use_tqdm=False)
    places = zip(result["token_ids"], result["logprobs"], strict=True)
    told = [entries[token_id].logprob for token_id, entries in places]
    assert told == pytest.approx(scores["token_logprobs"][3:], abs=1e-4)


def test_a_stream_and_asyncio_give_the_same_text(llm, folder):
    params = SamplingParams(max_tokens=60, seed=2, structured_outputs=JSON)
    [result] = llm.generate("x", params, use_tqdm=False)
    assert "".join(llm.stream("x", params)) == result["text"]
    with AsyncLLM(folder, **EXACT, num_kvcache_blocks=40) as engine:
        assert asyncio.run(engine.generate("x", params))["text"] == result["text"]


SPECIAL = [
    ({"json": {"const": "<|end|>"}}, '"<|end|>"'),
    ({"regex": r"<\|end\|>/!"}, "<|end|>/!"),
    ({"choice": ["x<|end|>y"]}, "x<|end|>y"),
    ({"choice": ["\x7f"]}, "\x7f"),
    ({"regex": "a\x7f"}, "a\x7f"),
    ({"grammar": 'start: "<|" END\nEND: "end|>."  // the last line'}, "<|end|>."),
    ({"grammar": 'root ::= "<|end" "|>."'}, "<|end|>."),
]


@pytest.mark.parametrize("fields, text", SPECIAL, ids=str)
def test_a_literal_that_spells_a_special_token_is_text(llm, fields, text):
    wanted = StructuredOutputsParams(**fields, **{"disable_any_whitespace": True} if "json" in fields else {})
    result = answer(llm, wanted)
    assert (result["text"], result["finish_reason"]) == (text, "stop")
    assert result["token_ids"][-1] == END and len(result["token_ids"]) == len(text) + 1


def test_a_grammar_may_ask_for_a_special_token_by_name(llm):
    result = answer(llm, StructuredOutputsParams(grammar='start: "a" <|end|>'), ignore_eos=True, max_tokens=2)
    assert result["token_ids"] == [LETTERS[0], END]


NUMBER = {"type": "integer", "minimum": 0, "maximum": 9}
LISTED = {"type": "object", "properties": {"a": NUMBER}, "required": ["a"]}


def writes(llm: LLM, schema: Any, text: str, **options: Any) -> bool:
    """Whether an answer that the schema asks for may be this text."""
    wanted = StructuredOutputsParams(json=schema, disable_any_whitespace=True, **options)
    matcher = compiler_of(llm).compile(wanted).take()[1]
    tokens = llm.encode(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


OTHERS = '{"a":1,"b":2}'
OPENED = [
    (LISTED, False),
    ({**LISTED, "additionalProperties": True}, True),
    ({**LISTED, "additionalProperties": NUMBER}, True),
    ({**LISTED, "properties": {}, "required": []}, False),
    ({"type": "object"}, True),
    ({"patternProperties": {"a": NUMBER}, "type": "object"}, False),
    ({"$defs": {"x": LISTED}, "$ref": "#/$defs/x"}, False),
    ({"$defs": {"x": LISTED}, "allOf": [{"$ref": "#/$defs/x"}], "description": "one"}, False),
    ({"anyOf": [{"type": "null"}, LISTED]}, False),
    ({"const": {"a": 1, "b": 2, "properties": {}}}, False),
    # Described by several, each of which knows its own.
    ({"allOf": [LISTED, {"properties": {"b": NUMBER}, "required": ["b"]}]}, True),
    ({**LISTED, "anyOf": [{"required": ["b"]}]}, True),
    ({"$defs": {"x/y": LISTED}, "allOf": [{"$ref": "#/$defs/x~1y"}, {"required": ["b"]}]}, True),
    ({"$defs": {"x": LISTED, "y": {"$ref": "#/$defs/x"}}, "allOf": [{"$ref": "#/$defs/y"}, {}]}, True),
]


@pytest.mark.parametrize("schema, is_open", OPENED, ids=str)
def test_properties_that_a_schema_does_not_list_are_not_written_unless_they_are_allowed(llm, schema, is_open):
    assert writes(llm, schema, OTHERS) == is_open


def test_other_properties_are_written_where_they_are_not_disabled(llm):
    assert writes(llm, LISTED, OTHERS, disable_additional_properties=False)


@pytest.mark.parametrize(
    "wrap, text",
    [
        (lambda schema: {"type": "array", "items": schema}, "[%s]"),
        (lambda schema: {"type": "array", "prefixItems": [schema]}, "[%s]"),
        (lambda schema: {"type": "object", "additionalProperties": schema}, '{"k":%s}'),
        (lambda schema: {"type": "object", "properties": {"properties": schema}}, '{"properties":%s}'),
        (lambda schema: {"$ref": "#/k/0", "k": [schema]}, "%s"),
    ],
)
def test_nor_are_they_in_objects_anywhere_below(llm, wrap, text):
    assert writes(llm, wrap(LISTED), text % '{"a":1}') and not writes(llm, wrap(LISTED), text % OTHERS)


def test_a_pydantic_model_gets_the_fields_that_it_has(llm):
    pydantic = pytest.importorskip("pydantic")

    class Wheel(pydantic.BaseModel):
        size: int = pydantic.Field(ge=1, le=9)

    class Car(pydantic.BaseModel):
        front: Wheel
        back: Wheel | None = pydantic.Field(None, description="as well")

    assert writes(llm, Car, '{"front":{"size":3},"back":{"size":4}}')
    assert not writes(llm, Car, '{"front":{"size":3},"other":1}')
    assert not writes(llm, Car, '{"front":{"size":3,"other":1}}')


@pytest.mark.parametrize(
    "options, texts",
    [
        ({}, {"[1,2]", "[1, 2]", "[ 1,\n\t2 ]", "[\n1,2\n]"}),
        ({"disable_any_whitespace": True}, {"[1,2]"}),
        ({"whitespace_pattern": "[ ]?"}, {"[1,2]", "[1, 2]"}),
        ({"whitespace_pattern": "\n"}, {"[1,2]", "[\n1,2\n]"}),
    ],
)
def test_white_space_between_the_parts_of_json_is_as_asked_for(llm, options, texts):
    wanted = StructuredOutputsParams(json={"type": "array", "items": NUMBER}, **options)
    matcher = compiler_of(llm).compile(wanted).take()[1]
    found = set()
    for text in ("[1,2]", "[1, 2]", "[ 1,\n\t2 ]", "[\n1,2\n]"):
        matcher.reset()
        tokens = llm.encode(text)
        found |= {text} if matcher.try_consume_tokens(tokens) == len(tokens) else set()
    assert found == texts


# --- whatever else is running, and however ---


MODES = {
    "together": {},
    "preemption": {"num_kvcache_blocks": 9},
    "chunks": {"max_num_batched_tokens": 24},
    "three at a time": {"max_num_seqs": 3},
}


@pytest.mark.parametrize(
    "mode, overlap", [*((mode, True) for mode in MODES), ("preemption", False), ("chunks", False)]
)
@pytest.mark.usefixtures("no_forecast")
def test_every_request_gets_the_tokens_that_it_gets_alone(folder, alone, mode, overlap):
    options = MODES[mode]
    with LLM(folder, **{**EXACT, "num_kvcache_blocks": 400, **options}) as llm:
        llm._overlap = overlap
        assert_same(llm.generate(PROMPTS, PARAMS, use_tqdm=False), alone)
        assert (llm.stats()["num_preemptions"] > 0) == ("num_kvcache_blocks" in options)
        assert not masks_of(llm)._states, "kept for requests that have ended"
        assert_empty(llm)


class Graphs(list):
    """Stands for CUDA graphs: what was captured runs again when it is replayed."""

    def capture(self, step, in_two):
        self.append(in_two)
        return step if in_two else lambda: partial(lambda output: output, step()())


def test_graphs_padded_to_their_sizes_draw_the_same_tokens_in_one_stage_or_two(folder, alone):
    with LLM(folder, **EXACT, num_kvcache_blocks=400) as llm:
        graphs = llm.model_runner.graphs = Graphs()
        llm._overlap = True
        assert_same(llm.generate(PROMPTS, PARAMS, use_tqdm=False), alone)
        llm.generate(PROMPTS[:3], SamplingParams(0, 3), use_tqdm=False)
        llm.model_runner.graphs = None
        kinds = llm.model_runner.decoded
        assert {*graphs} == {True, False} and len(kinds) == len(graphs)
        assert sum(graphs) == sum(waiting(llm, wanted) for *_, wanted in kinds)


def test_two_ranks_draw_the_tokens_of_one(folder, alone):
    with LLM(folder, **EXACT, num_kvcache_blocks=400, tensor_parallel_size=2) as llm:
        assert_same(llm.generate(PROMPTS, PARAMS, use_tqdm=False), alone)
        masks_only = [i for i, params in enumerate(PARAMS) if i in (0, 5)]
        few = [[each[i] for i in masks_only] for each in (PROMPTS, PARAMS, alone)]
        assert_same(llm.generate(*few[:2], use_tqdm=False), few[2])


def test_nothing_is_kept_of_a_request_aborted_while_its_first_step_is_under_way(llm, monkeypatch):
    monkeypatch.setattr(llm, "_overlap", True)
    request_id = llm.add_request([1], SamplingParams(structured_outputs=JSON))
    llm.step()
    llm.abort(request_id)
    while not llm.is_finished():
        llm.step()
    assert not masks_of(llm)._states
    assert_empty(llm)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
def test_only_steps_with_such_a_request_wait_for_masks(llm, monkeypatch, overlap):
    batches, called = [], Counter()
    call = llm.model_runner.call

    def count(name, *args):
        called[name] += 1
        batches.extend([args[0]] if name == "run" else [])
        return call(name, *args)

    monkeypatch.setattr(llm, "_overlap", overlap)
    monkeypatch.setattr(llm.model_runner, "call", count)
    llm.generate([[1]] * 3, SamplingParams(0, 9), use_tqdm=False)
    assert called["run"] and not called["sample"] and not any(waiting(llm, each.wanted) for each in batches)
    called.clear()
    params = [SamplingParams(0, 20, True), SamplingParams(0, 5, True, structured_outputs=JSON)]
    llm.generate([[1]] * 2, params, use_tqdm=False)
    assert called["sample"] == 5 < called["run"]


def test_the_forward_pass_is_enqueued_before_the_tokens_that_masks_depend_on_are_read(llm, monkeypatch):
    order = []

    def watch(target, name):
        function = getattr(target, name)
        monkeypatch.setattr(target, name, lambda *args: (order.append(name), function(*args))[1])

    watch(llm.model_runner, "run")
    watch(llm.scheduler, "postprocess")
    watch(llm.scheduler, "schedule")
    watch(masks_of(llm), "host_input")
    watch(llm.model_runner, "sample")
    monkeypatch.setattr(llm, "_overlap", True)
    llm.generate([[1]], SamplingParams(0, 3, True, structured_outputs=JSON), use_tqdm=False)
    rest = ["schedule", "run", "postprocess", "host_input", "sample"] * 2
    assert order == ["schedule", "run", "host_input", "sample", *rest, "schedule", "postprocess"]


# --- matchers ---


def test_threads_and_memory_of_masks_end_with_the_engine(folder):
    with LLM(folder, **EXACT, num_kvcache_blocks=40) as llm:
        llm.generate([[1]] * 4, SamplingParams(0, 3, structured_outputs=JSON), use_tqdm=False)
        assert {"_threads", "_bits"} <= {*vars(masks_of(llm))}
    assert not {"_threads", "_bits"} & {*vars(masks_of(llm))}


def test_texts_of_a_grammar_have_lexers_of_their_own_which_later_ones_use_again(llm):
    grammar = compiler_of(llm).compile(StructuredOutputsParams(regex="[ab]{3}[0-9]"))
    taken = [grammar.take() for _ in range(MAX_LEXERS + 4)]
    assert len({id(lexer) for lexer, _ in taken}) == MAX_LEXERS
    assert len({id(matcher) for _, matcher in taken}) == len(taken)
    lexer, matcher = taken[0]
    first = matcher.compute_bitmask()
    matcher.consume_token(
        int(np.flatnonzero(np.unpackbits(np.frombuffer(first, np.uint8), bitorder="little"))[0])
    )
    grammar.put_back(lexer, matcher)
    again, matcher = grammar.take()
    assert again is lexer and matcher.compute_bitmask() == first


def test_a_grammar_that_takes_long_to_compile_is_compiled_once(llm):
    compile_quickly = compiler_of(llm).compile(JSON).take()[1].deep_copy

    def compile_slowly() -> Any:
        time.sleep(0.6)
        return compile_quickly()

    grammar = CompiledGrammar(compile_slowly)
    grammar.compile()
    assert len({id(grammar.take()[0]) for _ in range(4)}) == 1


def test_a_lexer_that_has_failed_is_not_used_again(llm):
    grammar = compiler_of(llm).compile(StructuredOutputsParams(regex="[ab]{3}[0-8]"))
    taken = [grammar.take() for _ in range(2 * MAX_LEXERS)]
    failed, matcher = taken[0]
    copies = [each for each in taken[1:] if each[0] is failed]
    matcher.consume_token(7)
    assert matcher.is_error() and copies
    for each in [*copies, taken[0], *copies]:
        grammar.put_back(*each)
    assert all(grammar.take()[0] is not failed for _ in range(2 * MAX_LEXERS))


# --- once compiled ---


def test_a_schema_is_compiled_once_however_it_is_written(folder, monkeypatch):
    with LLM(folder, **EXACT, num_kvcache_blocks=40) as llm:
        compiled = []
        source = compiler_of(llm)._source
        monkeypatch.setattr(
            compiler_of(llm), "_source", lambda wanted: (compiled.append(wanted), source(wanted))[1]
        )
        for _ in range(2):
            for schema in (SCHEMA, dict(SCHEMA), json.dumps(SCHEMA)):
                answer(llm, StructuredOutputsParams(json=schema), max_tokens=2)
        assert len(compiled) == 1


def test_importing_the_package_does_not_import_llguidance():
    script = "import sys, nanovllm; assert not {'llguidance', 'jsonschema'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


# --- what goes wrong ---


BAD = [
    ({}, "exactly one of json, regex, choice, grammar, json_object"),
    ({"regex": "a", "choice": ["b"]}, "exactly one of .* got {'choice': \\['b'\\], 'regex': 'a'}"),
    ({"json_object": False}, "exactly one of"),
    ({"json_object": 1}, "json_object must be True or False, got 1"),
    ({"json": 5}, "json must be a JSON schema.* got 5"),
    ({"json": "{"}, "json must be a JSON schema.* got '{': Expecting"),
    ({"json": "[1]"}, "json must be a JSON schema.* neither an object nor true or false"),
    ({"json": {"enum": [float("nan")]}}, "json must be a JSON schema.* got {'enum': \\[nan\\]}"),
    ({"json": {"enum": [object]}}, "json must be a JSON schema.* not JSON serializable"),
    ({"regex": ""}, "regex must be a text, not empty"),
    ({"regex": 5}, "regex must be a text.* got 5"),
    ({"grammar": "\ud800"}, "grammar must be a text.*lone surrogate"),
    ({"choice": []}, "choice must be a list of texts.* got \\[\\]"),
    ({"choice": "yes"}, "choice must be a list of texts.* got 'yes'"),
    ({"choice": ["a", ""]}, "choice must be a list of texts.* got \\['a', ''\\]"),
    ({"json": {}, "disable_any_whitespace": 0}, "disable_any_whitespace must be True or False, got 0"),
    (
        {"json": {}, "disable_additional_properties": None},
        "disable_additional_properties must be True or Fal",
    ),
    ({"json": {}, "whitespace_pattern": ""}, "whitespace_pattern must be a text, not empty.* got ''"),
    (
        {"json": {}, "whitespace_pattern": " ?", "disable_any_whitespace": True},
        "disable_any_whitespace leaves no white space, got whitespace_pattern=' [?]' as well",
    ),
    ({"json": {"const": "a" * 2**20}}, "json must have at most 1,048,576 characters, got 1,048,589"),
    ({"regex": "a" * (2**20 + 1)}, "regex must have at most 1,048,576 characters, got 1,048,577"),
    ({"choice": ["a" * 2**19, "b" * 2**19, "c"]}, "choice must have at most 1,048,576 char.* got 1,048,577"),
]


@pytest.mark.parametrize("fields, message", BAD, ids=lambda each: str(each)[:80])
def test_a_bad_value_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        StructuredOutputsParams(**fields)


def test_sampling_params_take_nothing_else_and_no_second_list_of_allowed_tokens():
    with pytest.raises(ValueError, match="structured_outputs must be None or Struct.* got {'regex': 'a'}"):
        SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(ValueError, match=r"which tokens are allowed, got allowed_token_ids=\(1, 2\) as well"):
        SamplingParams(structured_outputs=JSON, allowed_token_ids=[1, 2])


IMPOSSIBLE = [
    (dict(json={"type": "foo"}), "Invalid type: foo"),
    (dict(json={"not": {}}), "Unimplemented keys"),
    (dict(json={"type": "string", "minLength": 5, "maxLength": 3}), "Unsatisfiable schema"),
    (dict(json={"$ref": "#/nowhere"}), "'/nowhere' does not exist"),
    (dict(json={"enum": ["\ud800"]}), "cannot be used"),
    (dict(json='{"items":' * 500 + "{}" + "}" * 500), "recursion limit"),
    (dict(json={}, whitespace_pattern="a("), "unclosed group"),
    (dict(regex="a("), "unclosed group"),
    (dict(regex=r"b[^\s\S]"), "no text fits"),
    (dict(grammar="start: other"), 'unknown name: "other"'),
    (dict(grammar="root ::= ("), "GBNF"),
]


@pytest.mark.parametrize("fields, message", IMPOSSIBLE, ids=str)
def test_a_broken_or_impossible_grammar_is_an_error_of_its_request_before_anything_changes(
    llm, fields, message
):
    params = [SamplingParams(0, 3), SamplingParams(structured_outputs=StructuredOutputsParams(**fields))]
    with pytest.raises(ValueError, match=rf"(?s)prompts\[1\]: structured_outputs={{'.*{message}"):
        llm.generate([[1], [2]], params, use_tqdm=False)
    assert_empty(llm)
    (_, good), (_, error) = sorted(
        llm.generate_from([([1], params[0]), ([2], params[1])], return_exceptions=True), key=lambda x: x[0]
    )
    assert len(good["token_ids"]) == 3 and isinstance(error, ValueError)


@pytest.mark.slow
def test_a_deep_grammar_does_not_end_the_process(folder):
    command = [sys.executable, str(Path(__file__).with_name("deep_grammars.py")), folder]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stdout) == (0, "survived\n"), found.stderr[-2000:]


@pytest.mark.parametrize(
    "texts", [[f"{i:05d} choice" for i in range(32_000)], ["ab" * 2**19]], ids=["many", "long"]
)
def test_choices_are_compiled_in_time_that_grows_with_their_characters(llm, texts):
    start = time.perf_counter()
    result = answer(llm, StructuredOutputsParams(choice=texts), max_tokens=8)
    assert time.perf_counter() - start < 8
    assert any(text.startswith(result["text"]) for text in texts) and len(result["token_ids"]) == 8


def test_a_long_reason_is_shortened(llm):
    for fields in ({"regex": "(" * 100_000}, {"grammar": "start: " + "(" * 10_000}):
        with pytest.raises(ValueError, match="cannot be used") as error:
            answer(llm, StructuredOutputsParams(**fields))
        assert len(str(error.value)) < 1500


def test_what_takes_too_long_to_compile_is_given_up(llm, monkeypatch):
    monkeypatch.setattr("nanovllm.extensions.structured.grammar.MAX_SECONDS", 0.05)
    monkeypatch.setattr(compiler_of(llm).llguidance, "LLMatcher", lambda *_, **__: time.sleep(1))
    with pytest.raises(ValueError, match="it takes more than 0 s to compile"):
        answer(llm, StructuredOutputsParams(regex="never compiled before"))


def test_threads_that_want_the_same_compile_it_once_and_other_tasks_go_on(folder, monkeypatch):
    with AsyncLLM(folder, **EXACT, num_kvcache_blocks=40) as engine:
        compiled, make = [], compiler_of(engine.llm)._make_matcher

        def make_slowly(*args: Any) -> Any:
            compiled.append(args[0])
            time.sleep(1)
            return make(*args)

        async def run() -> tuple[list, int]:
            params = SamplingParams(max_tokens=4, seed=0, structured_outputs=JSON)
            tasks = [asyncio.create_task(engine.generate("x", params)) for _ in range(2)]
            tasks.append(asyncio.create_task(anext(engine.stream("x", params))))
            turns = 0
            while not any(task.done() for task in tasks):
                await asyncio.sleep(0.01)
                turns += 1
            return await asyncio.gather(*tasks), turns

        monkeypatch.setattr(compiler_of(engine.llm), "_make_matcher", make_slowly)
        results, turns = asyncio.run(run())
        assert results[0] == results[1] and turns > 20
        assert len(compiled) == 1

        async def fail() -> None:
            await engine.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(regex="a(")))

        with pytest.raises(
            ValueError, match="sampling_params for prompt: structured_outputs.* cannot be used"
        ):
            asyncio.run(fail())


def test_a_grammar_that_fails_on_the_way_ends_its_request_alone(llm, monkeypatch):
    host_input, failed = masks_of(llm).host_input, []

    def fail(sequences):
        for seq in sequences:
            if seq.prompt_token_ids == [2] and len(seq.token_ids) == 4:
                failed.append(seq)
                raise GrammarError(seq, "too large")
        return host_input(sequences)

    params = SamplingParams(0, 20, structured_outputs=JSON)
    expected = llm.generate([[1], [3]], params, use_tqdm=False)
    monkeypatch.setattr(masks_of(llm), "host_input", fail)
    requests = [([token], params) for token in (1, 2, 3)]
    for overlap in (True, False):
        monkeypatch.setattr(llm, "_overlap", overlap)
        found = dict(llm.generate_from(requests, return_exceptions=True))
        assert [found[0], found[2]] == expected
        assert isinstance(found[1], GrammarError) and "too large" in str(found[1])
        assert_empty(llm)
    assert len(failed) == 2, "others were suspected"


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
def test_an_error_of_a_thread_is_an_error_of_the_step(llm, monkeypatch, overlap):
    def fail(*_: list) -> None:
        raise OSError("no memory for a mask")

    monkeypatch.setattr(llm, "_overlap", overlap)
    params = SamplingParams(0, 20, structured_outputs=JSON)
    expected = llm.generate([[1], [3]], params, use_tqdm=False)
    with monkeypatch.context() as patched:
        patched.setattr(BitmaskProcessor, "_make_masks", fail)
        with pytest.raises(OSError, match="no memory for a mask"):
            llm.generate([[1], [3]], params, use_tqdm=False)
    assert_empty(llm)
    assert llm.generate([[1], [3]], params, use_tqdm=False) == expected


def test_a_token_that_a_grammar_does_not_allow_is_an_error_and_no_answer(llm):
    """As where the model has too few tokens to write what is wanted."""
    [request] = llm.prompts.read_all([[1, 2]], SamplingParams(structured_outputs=JSON))
    [seq] = llm.queue(request)
    seq.append_token(7)
    with pytest.raises(GrammarError, match="after 0 tokens: .*doesn't satisfy the grammar") as error:
        llm.parts.logits_processor("bitmask").host_input([seq])
    assert error.value.sequence is seq and "\n" not in str(error.value)
    llm.clear()


TOO_OLD = r'need llguidance 1.9 or newer: pip install -e ".\[structured\]"'


def test_without_llguidance_the_error_says_how_to_install_it(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with LLM(folder, **EXACT, num_kvcache_blocks=40) as llm:
        with pytest.raises(ValueError, match=TOO_OLD):
            answer(llm, JSON)


def test_an_llguidance_that_is_too_old_is_refused(folder, monkeypatch):
    monkeypatch.setattr("nanovllm.extensions.structured.grammar.version", lambda _: "1.6.1")
    with LLM(folder, **EXACT, num_kvcache_blocks=40) as llm:
        with pytest.raises(ValueError, match=TOO_OLD):
            answer(llm, JSON)
        monkeypatch.setattr("nanovllm.extensions.structured.grammar.version", lambda _: "1.10rc1")
        answer(llm, JSON)


def test_without_a_tokenizer_or_an_end_token_there_is_no_structured_output(tmp_path):
    folder = make_checkpoint(tmp_path / "bare", tokenizer=False, num_hidden_layers=1)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=20) as llm:
        with pytest.raises(ValueError, match="structured_outputs need a tokenizer, but .* has none"):
            llm.generate([[1]], SamplingParams(structured_outputs=JSON), use_tqdm=False)
    folder = make_checkpoint(tmp_path / "endless", **CHECKPOINT)
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=20) as llm:
        with pytest.raises(ValueError, match="need an end-of-sequence token, but .* has none"):
            llm.generate([[1]], SamplingParams(structured_outputs=JSON), use_tqdm=False)
