"""Compiles what a request's completion must look like, by llguidance, and keeps compiled grammars.

llguidance is imported when the first request asks for it. Knows nothing of sequences, logits or devices.
"""

import concurrent.futures
import functools
import json
import re
import threading
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from nanovllm.config import Config
from nanovllm.extensions.structured.json_schema import close_objects
from nanovllm.extensions.structured.matchers import CompiledGrammar, problem_of
from nanovllm.extensions.structured.params import StructuredOutputsParams
from nanovllm.utils.validation import shorten, shown

MAX_COMPILED = 256  # grammars that are kept; each with up to MAX_LEXERS lexers of a megabyte or so
# llguidance compiles by recursion, and a stack that overflows ends the process. For each level it takes up to
# 8,400 bytes (an object of a schema) or 5,400 (a rule of a grammar). Nothing that it does later recurses.
MAX_LEVELS = 16_384
STACK_BYTES = 16 * 2**20 + 24 * 2**10 * MAX_LEVELS  # only what is touched of it takes memory
MAX_GBNF_RULES = 2_000  # turning them into Lark's takes time in their number's square
MAX_SECONDS = 60.0
# Without this, text that can only go on in one way must do so in the tokens that the tokenizer makes of it.
# For "<|end|>" that is the token that ends the answer, not the text.
NO_FORCING = '\n%llguidance {"no_forcing": true}'
# Tokens of these kinds llguidance allows all at once where it can; lengths, since texts may be limited.
SLICES = [r"[\x20\x0A\x0D\x09]+"]
SLICES += [rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (1, 3, 5, 8, 12, 30, "")]
_setting_stack_size = threading.Lock()  # the size holds for every thread that starts meanwhile


class Compiler:
    def __init__(self, config: Config, tokenizer: Any):
        self.config, self.tokenizer = config, tokenizer
        self._grammar = functools.lru_cache(MAX_COMPILED)(
            lambda wanted: CompiledGrammar(lambda: self._make_matcher(wanted))
        )

    def compile(self, wanted: StructuredOutputsParams) -> CompiledGrammar:
        """
        Any thread may call this. Raises ValueError if llguidance is not installed,
        cannot work with the tokenizer, or finds no text that is as wanted.
        """
        grammar = self._grammar(wanted)
        grammar.compile()
        return grammar

    def _make_matcher(self, wanted: StructuredOutputsParams) -> Any:
        vocabulary = self.vocabulary

        def make() -> Any:
            matcher = self.llguidance.LLMatcher(vocabulary, source, log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()  # finds out whether there is a first token
            return matcher

        try:
            source = self._source(wanted) + NO_FORCING
            matcher = _call_in_thread(make).result(MAX_SECONDS)
            reason = problem_of(matcher)
        except ValueError as error:
            reason = shorten(str(error))
        except concurrent.futures.TimeoutError:  # the thread cannot be ended, and works on
            reason = f"it takes more than {MAX_SECONDS:.0f} s to compile"
        if reason:
            given = {name: value for name, value in asdict(wanted).items() if value}
            raise ValueError(f"structured_outputs={shown(given)} cannot be used: {reason}")
        return matcher

    def _source(self, wanted: StructuredOutputsParams) -> str:
        """In Lark's notation, as llguidance reads it. Raises ValueError for what cannot be written in it."""
        if wanted.regex is not None:
            return f"start: /{self.llguidance.regex_to_lark(wanted.regex, '')}/"
        if wanted.choice is not None:
            # One terminal: as alternatives of a rule they would be parsed one by one.
            texts = (json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(wanted.choice))
            return f"start: CHOICE\nCHOICE: {' | '.join(texts)}".replace("\x7f", "\\u007f")
        if wanted.grammar is not None:
            _check_number(MAX_GBNF_RULES, "rules in GBNF's notation", wanted.grammar.count("::="))
            source = self.llguidance.grammar_from("grammar", wanted.grammar)
            _check_number(MAX_LEVELS, "rules, groups and objects", sum(map(source.count, ":([{~")))
            return source
        schema = _read_schema(wanted)
        _check_number(MAX_LEVELS, "objects", schema.count("{"))
        return f"start: %json {schema}"

    @functools.cached_property
    def llguidance(self) -> Any:
        try:
            import llguidance.hf
            import llguidance.numpy

            if [*map(int, re.findall(r"\d+", version("llguidance"))[:2])] < [1, 9]:
                raise ImportError
        except ImportError as error:
            how = 'pip install -e ".[structured]"'
            raise ValueError(f"structured_outputs need llguidance 1.9 or newer: {how}") from error
        return llguidance

    @functools.cached_property
    def vocabulary(self) -> Any:
        """The texts of all tokens. Takes a moment when it is first asked for."""
        config, tokenizer, model = self.config, self.tokenizer, self.config.model
        if tokenizer is None:
            raise ValueError(f"structured_outputs need a tokenizer, but {model!r} has none")
        ends = [token_id for token_id in config.eos if token_id < len(tokenizer)]
        if not ends:
            raise ValueError(f"structured_outputs need an end-of-sequence token, but {model!r} has none")
        size = max(config.hf_config.vocab_size, len(tokenizer))
        try:
            return self.llguidance.hf.from_tokenizer(tokenizer, size, ends, SLICES)
        except Exception as error:  # whatever it does not know
            rule = f"structured_outputs cannot be used with the tokenizer of {model!r}"
            raise ValueError(f"{rule}: {error}") from error


def _call_in_thread(function: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """What `function()` returns or raises, called in a thread with a stack for MAX_LEVELS."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    with _setting_stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=call, daemon=True).start()
        finally:
            threading.stack_size(before)
    return future


def _check_number(most: int, what: str, number: int) -> None:
    if number > most:
        raise ValueError(f"it must have at most {most:,} {what}, got {number:,}")


def _read_schema(wanted: StructuredOutputsParams) -> str:
    """The schema with the options that it was given with."""
    schema = json.loads(wanted.json or '{"type": "object"}')
    if isinstance(schema, dict):
        if wanted.disable_additional_properties:
            close_objects(schema)
        options = {"whitespace_flexible": not wanted.disable_any_whitespace}
        if wanted.whitespace_pattern is not None:
            options = {"whitespace_pattern": wanted.whitespace_pattern}
        given = schema.get("x-guidance")
        schema["x-guidance"] = (given if isinstance(given, dict) else {}) | options
    return json.dumps(schema)
