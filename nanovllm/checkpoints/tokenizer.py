"""What the engine needs of transformers' tokenizers."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

MAX_TEXT = 2**26  # characters of a rendered chat


@contextlib.contextmanager
def tokenizer_errors(message: str) -> Iterator[None]:
    """Turn any error that damaged files cause in a library into a ValueError beginning with this message."""
    try:
        yield
    except BaseException as error:
        # A panic of Rust code is not an Exception.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{message}: {error!r:.500}") from error
        raise


def guard_decode(tokenizer: Any, path: str) -> Any:
    """
    Change how a tokenizer decodes, and return it: spaces before punctuation stay, so that a text is made of
    the texts of its parts, and a panic in a decoder is a ValueError that names the path.
    """
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.decode = functools.partial(_decode, tokenizer, path)
    return tokenizer


def _decode(tokenizer: Any, path: str, *args: Any, **kwargs: Any) -> str:
    with tokenizer_errors(f"{path}: the tokenizer cannot decode"):
        return type(tokenizer).decode(tokenizer, *args, **kwargs)


def render_chat(tokenizer: Any, conversation: list[dict[str, Any]], **options: Any) -> str:
    """
    A conversation as text. The chat template is somebody else's program; jinja2's sandbox, in which it runs,
    gives it no access to Python or to files. Raises any exception that it causes.
    """
    text = tokenizer.apply_chat_template(conversation, tokenize=False, **options)
    if len(text) > MAX_TEXT:
        raise ValueError(f"it makes a text of {len(text)} characters; at most {MAX_TEXT} are tokenized")
    return text
