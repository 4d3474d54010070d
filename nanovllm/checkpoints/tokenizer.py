"""What the engine needs of transformers' tokenizers."""

import contextlib
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


def render_chat(tokenizer: Any, conversation: list[dict[str, Any]], **options: Any) -> str:
    """
    A conversation as text. The chat template is somebody else's program; jinja2's sandbox, in which it runs,
    gives it no access to Python or to files. Raises any exception that it causes.
    """
    text = tokenizer.apply_chat_template(conversation, tokenize=False, **options)
    if len(text) > MAX_TEXT:
        raise ValueError(f"it makes a text of {len(text)} characters; at most {MAX_TEXT} are tokenized")
    return text
