"""What users get back: the text of a completion, whole or while it grows, and the result of a prompt."""

from typing import Any

from nanovllm.engine.sequence import Sequence
from nanovllm.utils.detokenizer import Detokenizer


def completion_text(tokenizer: Any, seq: Sequence) -> str:
    """The text of a finished completion; empty without a tokenizer."""
    params, token_ids = seq.sampling_params, seq.completion_token_ids
    if tokenizer is None or not params.detokenize:
        return ""
    if seq.text is not None:
        return seq.text
    if seq.stop_reason is not None and not params.include_stop_str_in_output:
        token_ids = token_ids[:-1]
    return tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)


def make_result(tokenizer: Any, completions: list[Sequence]) -> dict[str, Any]:
    """The result of a prompt (see `LLMEngine.generate`) from its finished completions."""
    outputs = [
        {
            "text": completion_text(tokenizer, seq),
            "token_ids": seq.completion_token_ids,
            "finish_reason": seq.finish_reason,
            "stop_reason": seq.stop_reason,
        }
        for seq in completions
    ]
    first = completions[0]
    prompt = {
        "num_prompt_tokens": first.num_prompt_tokens,
        "num_cached_tokens": first.num_prompt_tokens_cached,
    }
    return {**outputs[0], **prompt, **({"outputs": outputs} if len(outputs) > 1 else {})}


class GrowingText:
    """The text of a completion that is being made."""

    def __init__(self, tokenizer: Any, seq: Sequence):
        self.tokenizer = tokenizer
        self.seq = seq
        self.pieces = Detokenizer(tokenizer, seq.sampling_params.skip_special_tokens)
        self.num_shown = 0

    def find_stop(self) -> str | None:
        """
        The stop text that the newest tokens complete, if they do; the completion's text then ends there.
        """
        params, num_old = self.seq.sampling_params, len(self.pieces.text)
        text = self._read()
        starts = {stop: text.find(stop, max(0, num_old - len(stop) + 1)) for stop in params.stop}
        found = [(start, stop) for stop, start in starts.items() if start >= 0]
        if not found:
            return None
        start, stop = min(found)
        self.seq.text = text[: start + len(stop) * params.include_stop_str_in_output]
        return stop

    def look(self) -> str:
        """
        What is new since the last look: whole characters, and nothing that a stop text may yet take back.
        """
        if self.seq.is_finished:
            sure = completion_text(self.tokenizer, self.seq)
        else:
            text = self._read()
            sure = text[: len(text) - self.pieces.num_held_back(self.seq.sampling_params.stop)]
        piece = sure[self.num_shown :]
        self.num_shown += len(piece)
        return piece

    def _read(self) -> str:
        self.pieces.add(self.seq.token_ids[self.seq.num_prompt_tokens + len(self.pieces.token_ids) :])
        return self.pieces.text
