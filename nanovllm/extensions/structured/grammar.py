"""Structured outputs: which tokens a completion can go on with, so that it becomes what its request asks for.

llguidance compiles schemas and grammars and follows texts through them. It is imported when the first request
asks for it. `Grammars` keeps a reader for each sequence (matchers.py), which has read the tokens drawn so
far; masks are what may come next. Knows nothing of logits or devices.
"""

import concurrent.futures
import functools
import json
import threading
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine.interfaces import SequenceError
from nanovllm.engine.sequence import Sequence
from nanovllm.extensions.structured.deep_stack import call_with_stack
from nanovllm.extensions.structured.json_schema import close_objects
from nanovllm.extensions.structured.matchers import Grammar, Reader, problem_of
from nanovllm.extensions.structured.params import StructuredOutputsParams
from nanovllm.utils.validation import shorten, shown

MAX_COMPILED = 256  # grammars that are kept; each with up to MAX_LEXERS lexers of a megabyte or so
# llguidance compiles by recursion, and a stack that overflows ends the process. For each level it takes up to
# 8,400 bytes (an object of a schema) or 5,400 (a rule of a grammar). Nothing that it does later recurses.
MAX_LEVELS = 16_384
STACK_BYTES, STACK_BYTES_PER_LEVEL = 16 * 2**20, 24 * 2**10
MAX_GBNF_RULES = 2_000  # turning them into Lark's takes time in their number's square
MAX_SECONDS = 60.0
# Without this, text that can only go on in one way must do so in the tokens that the tokenizer makes of it.
# For "<|end|>" that is the token that ends the answer, not the text.
NO_FORCING = '\n%llguidance {"no_forcing": true}'
# Tokens of these kinds llguidance allows all at once where it can; lengths, since texts may be limited.
SLICES = [r"[\x20\x0A\x0D\x09]+"]
SLICES += [rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (1, 3, 5, 8, 12, 30, "")]


class GrammarError(SequenceError):
    """A sequence cannot go on: its grammar has become too large, or needs text that no token has."""

    def __init__(self, sequence: Sequence, reason: str):
        after = f"structured_outputs after {sequence.num_completion_tokens - 1} tokens"
        super().__init__(sequence, f"{after}: {reason}")


class CacheEntry:
    """A grammar that is compiled once, however many threads ask for it."""

    def __init__(self) -> None:
        self.compiling = threading.Lock()
        self.grammar: Grammar | None = None


class Grammars:
    def __init__(self, config: Config, tokenizer: Any):
        self.config, self.tokenizer = config, tokenizer
        self._entry = functools.lru_cache(MAX_COMPILED)(lambda wanted: CacheEntry())
        self._readers: dict[int, Reader] = {}  # by seq_id

    def reset(self) -> None:
        """Forget how far sequences have been read. They are read again when they go on."""
        for seq_id in [*self._readers]:
            self.drop(seq_id)

    def drop(self, seq_id: int) -> None:
        """Forget a sequence that has ended."""
        if (reader := self._readers.pop(seq_id, None)) is not None:
            reader.close()

    def compile(self, wanted: StructuredOutputsParams) -> Grammar:
        """
        Any thread may call this. Raises ValueError if llguidance is not installed,
        cannot work with the tokenizer, or finds no text that is as wanted.
        """
        entry = self._entry(wanted)
        with entry.compiling:
            if entry.grammar is None:
                vocabulary = self._vocabulary  # takes a moment when it is first asked for
                entry.grammar = Grammar(lambda: self._make_matcher(wanted, vocabulary))
            return entry.grammar

    def _make_matcher(self, wanted: StructuredOutputsParams, vocabulary: Any) -> Any:
        matcher = None

        def make() -> Any:
            found = self._llguidance.LLMatcher(vocabulary, source, log_level=0)
            if not found.is_error():
                found.compute_bitmask()  # finds out whether there is a first token
            return found

        try:
            source = self._source(wanted)
            num_bytes = STACK_BYTES + STACK_BYTES_PER_LEVEL * self._num_levels(wanted, source)
            matcher = call_with_stack(make, num_bytes, MAX_SECONDS)
            reason = problem_of(matcher)
        except ValueError as error:
            reason = shorten(str(error))
        except concurrent.futures.TimeoutError:
            reason = f"it takes more than {MAX_SECONDS:.0f} s to compile"
        if reason:
            given = {name: value for name, value in asdict(wanted).items() if value}
            raise ValueError(f"structured_outputs={shown(given)} cannot be used: {reason}")
        return matcher

    @staticmethod
    def _num_levels(wanted: StructuredOutputsParams, source: str) -> int:
        """How deep compiling it may recurse, at most. Raises ValueError if that is too deep."""
        said, marks = "rules, groups and objects", ":([{~"
        if wanted.grammar is None:
            said, marks = "objects", "{" if wanted.json is not None else ""
        num_levels = sum(map(source.count, marks))
        if num_levels > MAX_LEVELS:
            raise ValueError(f"it must have at most {MAX_LEVELS:,} {said}, got {num_levels:,}")
        return num_levels

    def _source(self, wanted: StructuredOutputsParams) -> str:
        """In Lark's notation, as llguidance reads it. Raises ValueError for what cannot be written in it."""
        if wanted.json is not None or wanted.json_object:
            source = f"start: %json {_read_schema(wanted)}"
        elif wanted.regex is not None:
            [grammar] = json.loads(self._llguidance.grammar_from("regex", wanted.regex))["grammars"]
            source = grammar["lark_grammar"]
        elif wanted.choice is not None:
            # One terminal: as alternatives of a rule they would be parsed one by one.
            texts = (json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(wanted.choice))
            source = f"start: CHOICE\nCHOICE: {' | '.join(texts)}".replace("\x7f", "\\u007f")
        else:
            if (num_rules := wanted.grammar.count("::=")) > MAX_GBNF_RULES:
                rule = f"a grammar in GBNF's notation must have at most {MAX_GBNF_RULES:,} rules"
                raise ValueError(f"{rule}, got {num_rules:,}")
            source = self._llguidance.grammar_from("grammar", wanted.grammar)
        return source + NO_FORCING

    @functools.cached_property
    def _llguidance(self) -> Any:
        try:
            import llguidance
            import llguidance.hf
        except ImportError as error:
            raise ValueError('structured_outputs need llguidance: pip install -e ".[structured]"') from error
        return llguidance

    @functools.cached_property
    def _vocabulary(self) -> Any:
        """The texts of all tokens."""
        config, tokenizer, model = self.config, self.tokenizer, self.config.model
        if tokenizer is None:
            raise ValueError(f"structured_outputs need a tokenizer, but {model!r} has none")
        ends = [token_id for token_id in config.eos if token_id < len(tokenizer)]
        if not ends:
            raise ValueError(f"structured_outputs need an end-of-sequence token, but {model!r} has none")
        size = max(config.hf_config.vocab_size, len(tokenizer))
        try:
            return self._llguidance.hf.from_tokenizer(tokenizer, size, ends, SLICES)
        except Exception as error:  # whatever it does not know
            rule = f"structured_outputs cannot be used with the tokenizer of {model!r}"
            raise ValueError(f"{rule}: {error}") from error

    @functools.cached_property
    def _threads(self) -> Any:
        """They share sequences among them, without Python's lock."""
        return self._llguidance.LLExecutor()

    @functools.cached_property
    def _bits(self) -> np.ndarray:
        """int32 [sequences, words]: where masks are made, from where a GPU can copy them by itself."""
        words = -(-self._vocabulary.vocab_size // 32)
        shape, is_pinned = (self.config.max_num_seqs, words), self.config.device != "cpu"
        return torch.empty(shape, dtype=torch.int32, device="cpu", pin_memory=is_pinned).numpy()

    def close(self) -> None:
        """End the threads and free what masks were made in."""
        for name in ("_threads", "_bits"):
            self.__dict__.pop(name, None)

    def masks(self, sequences: list[Sequence], grammars: dict[int, Grammar]) -> tuple[np.ndarray, np.ndarray]:
        """
        What the i-th of the sequences may go on with, where it has a grammar, after all its tokens, which
        must be known. Returns which of the masks each sequence has, -1 for none, and the masks, int32 [masks,
        words]: an array that is used again for the next masks. Raises GrammarError.
        """
        readers = {i: self._reader_of(sequences[i], grammar) for i, grammar in grammars.items()}
        # A thread works through neighbours: those that share a lexer would wait for each other in several.
        guided = sorted(readers, key=lambda i: id(readers[i].lexer))
        index = np.full(len(sequences), -1, dtype=np.int32)
        index[guided] = range(len(guided))
        if not guided:
            return index, np.zeros((0, 1), dtype=np.int32)
        bits = self._bits[: len(guided)]
        self._make_masks([readers[i] for i in guided], bits)
        for reader in readers.values():
            if reader.matcher.is_error():
                raise GrammarError(reader.sequence, problem_of(reader.matcher))
        return index, bits

    def _reader_of(self, seq: Sequence, grammar: Grammar) -> Reader:
        if (reader := self._readers.get(seq.seq_id)) is None:
            reader = self._readers[seq.seq_id] = Reader(seq, grammar)
        return reader

    def _make_masks(self, readers: list[Reader], bits: np.ndarray) -> None:
        """In their order, in bits, int32 [readers, words]."""
        steps = []
        for reader in readers:
            new = reader.take_new()
            if len(new) == 1:
                steps.append((reader.matcher, new[0]))
            else:
                reader.matcher.consume_tokens(new)
        if steps:
            self._threads.consume_token_par(steps)
        places = [(reader.matcher, place) for place, reader in enumerate(readers)]
        self._threads.unsafe_compute_mask_ptr(places, bits.ctypes.data, bits.strides[0], len(bits))


def _read_schema(wanted: StructuredOutputsParams) -> str:
    """The schema with the options that it was given with."""
    schema = json.loads(wanted.json or '{"type": "object"}')
    if isinstance(schema, bool):
        return json.dumps(schema)
    if wanted.disable_additional_properties:
        close_objects(schema)
    options = {"whitespace_flexible": not wanted.disable_any_whitespace}
    if wanted.whitespace_pattern is not None:
        options = {"whitespace_pattern": wanted.whitespace_pattern}
    given = schema.get("x-guidance")
    schema["x-guidance"] = (given if isinstance(given, dict) else {}) | options
    return json.dumps(schema)
