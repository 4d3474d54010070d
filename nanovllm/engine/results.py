"""What users get back."""

from typing import Any

from nanovllm.engine.sequence import Sequence


def completion_text(tokenizer: Any, seq: Sequence) -> str:
    """The text of a finished completion, without the token that ended it; empty without a tokenizer."""
    token_ids = seq.completion_token_ids
    if tokenizer is None:
        return ""
    if seq.finish_reason == "stop":
        token_ids = token_ids[:-1]
    return tokenizer.decode(token_ids, skip_special_tokens=True)


def make_result(tokenizer: Any, seq: Sequence) -> dict[str, Any]:
    """
    text, token_ids    the completion; token_ids include what ended it
    finish_reason      "stop" (an end-of-sequence token or a stop token), "length" or "abort"
    stop_reason        the stop token id that ended it, else None
    num_prompt_tokens, num_cached_tokens   of the prompt, and how many of these the KV cache had
    """
    return {
        "text": completion_text(tokenizer, seq),
        "token_ids": seq.completion_token_ids,
        "finish_reason": seq.finish_reason,
        "stop_reason": seq.stop_reason,
        "num_prompt_tokens": seq.num_prompt_tokens,
        "num_cached_tokens": seq.num_prompt_tokens_cached or 0,  # None: never admitted
    }
