"""Structured outputs: which tokens a completion can go on with, so that it becomes what its request asks for.

llguidance compiles schemas and grammars and follows texts through them. It is imported when the first request
asks for it. `Grammars` keeps a matcher for each sequence, which has read the tokens drawn so far; masks are
what the matchers allow next. Knows nothing of logits or devices.
"""

import functools
import json
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine.masks import TokenMasks
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.utils.validation import shown

MAX_COMPILED = 1024  # grammars that are kept


class GrammarError(RuntimeError):
    """A sequence cannot go on: its grammar has become too large, or needs text that no token has."""

    def __init__(self, sequence: Sequence, reason: str):
        super().__init__(f"structured_outputs after {sequence.num_completion_tokens - 1} tokens: {reason}")
        self.sequence = sequence


class Grammars:
    def __init__(self, config: Config, tokenizer: Any):
        self.config, self.tokenizer = config, tokenizer
        self.compile = functools.lru_cache(MAX_COMPILED)(self._compile)
        self.reset()

    def reset(self) -> None:
        """Forget how far sequences have been read. They are read again when they go on."""
        self._matchers: dict[int, tuple[Any, int]] = {}  # by seq_id, and how many tokens it has read

    def drop(self, seq_id: int) -> None:
        """Forget a sequence that has ended."""
        self._matchers.pop(seq_id, None)

    def _compile(self, wanted: StructuredOutputsParams) -> Any:
        """
        A matcher at the beginning of a text, for `Sequence.grammar`. Raises ValueError if llguidance is not
        installed, cannot work with the tokenizer, or finds no text that is as wanted.
        """
        vocabulary = self._vocabulary
        try:
            matcher = self._llguidance.LLMatcher(vocabulary, self._source(wanted), log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()  # finds out whether there is a first token
            reason = _reason(matcher)
        except ValueError as error:
            reason = str(error)
        if reason:
            given = {name: value for name, value in asdict(wanted).items() if value}
            raise ValueError(f"structured_outputs={shown(given)} cannot be used: {reason}")
        return matcher

    def _source(self, wanted: StructuredOutputsParams) -> str:
        """In llguidance's own notation."""
        if wanted.json is not None or wanted.json_object:
            options = {"whitespace_flexible": not wanted.disable_any_whitespace}
            schema = wanted.json or '{"type": "object"}'
            return self._llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)
        if wanted.regex is not None:
            return self._llguidance.grammar_from("regex", wanted.regex)
        if wanted.choice is not None:
            texts = (json.dumps(text, ensure_ascii=False) for text in wanted.choice)
            return f"start: {' | '.join(texts)}"
        return self._llguidance.grammar_from("grammar", wanted.grammar)

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
        """The texts of all tokens; this takes a moment."""
        config, tokenizer, model = self.config, self.tokenizer, self.config.model
        if tokenizer is None:
            raise ValueError(f"structured_outputs need a tokenizer, but {model!r} has none")
        ends = [token_id for token_id in config.eos if token_id < len(tokenizer)]
        if not ends:
            raise ValueError(f"structured_outputs need an end-of-sequence token, but {model!r} has none")
        size = max(config.hf_config.vocab_size, len(tokenizer))
        try:
            return self._llguidance.hf.from_tokenizer(tokenizer, n_vocab=size, eos_token=ends)
        except Exception as error:  # whatever it does not know
            rule = f"structured_outputs cannot be used with the tokenizer of {model!r}"
            raise ValueError(f"{rule}: {error}") from error

    @functools.cached_property
    def _executor(self) -> Any:
        """Threads, which work without Python's lock."""
        return self._llguidance.LLExecutor()

    @functools.cached_property
    def _bits(self) -> np.ndarray:
        """int32 [sequences, words]: where masks are made, from where a GPU can copy them by itself."""
        words = -(-self._vocabulary.vocab_size // 32)
        shape, is_pinned = (self.config.max_num_seqs, words), self.config.device != "cpu"
        return torch.empty(shape, dtype=torch.int32, device="cpu", pin_memory=is_pinned).numpy()

    def masks(self, sequences: list[Sequence]) -> TokenMasks:
        """
        What each of the sequences may go on with after all its tokens, which must be known. The array is used
        again for the next masks. Raises GrammarError.
        """
        guided = [i for i, seq in enumerate(sequences) if seq.grammar is not None and not seq.is_finished]
        index = np.full(len(sequences), -1, dtype=np.int32)
        index[guided] = range(len(guided))
        if not guided:
            return TokenMasks(index, np.zeros((0, 1), dtype=np.int32))
        matchers, steps = [], []
        for seq in (sequences[i] for i in guided):
            matcher, num_read = self._matchers.get(seq.seq_id) or (None, seq.num_prompt_tokens)
            matcher = matcher or seq.grammar.deep_copy()
            new = seq.token_ids[num_read:]
            if len(new) == 1:
                steps.append((matcher, new[0]))
            else:
                matcher.consume_tokens(new)
            self._matchers[seq.seq_id] = matcher, len(seq.token_ids)
            matchers.append(matcher)
        if steps:
            self._executor.consume_token_par(steps)
        bits = self._bits[: len(matchers)]
        places = list(zip(matchers, range(len(matchers)), strict=True))
        self._executor.unsafe_compute_mask_ptr(places, bits.ctypes.data, bits.strides[0], len(bits))
        for i, matcher in zip(guided, matchers, strict=True):
            if matcher.is_error():
                raise GrammarError(sequences[i], _reason(matcher))
        return TokenMasks(index, bits)


def _reason(matcher: Any) -> str:
    """Why a matcher is in error, without the description of its state; empty if it is not."""
    reason = matcher.get_error().split("\n<")[0].strip()
    return "no text fits" if reason.startswith("NoExtension") else reason
