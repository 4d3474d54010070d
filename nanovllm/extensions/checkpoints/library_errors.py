"""What a stranger's files make of a library: it fails in no other way than a ValueError that names them.

A tokenizer does so as long as it is used, and writes no endless texts.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

MAX_TEXT = 2**26  # characters of a rendered chat


@contextlib.contextmanager
def library_errors(message: str) -> Iterator[None]:
    """Turn any error that files cause into a ValueError beginning with this message."""
    try:
        yield
    except BaseException as error:
        # A panic of Rust code is not an Exception.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            told = error if isinstance(error, ValueError | OSError) else repr(error)
            raise ValueError(f"{message}: {told!s:.500}") from error
        raise


def guarded(tokenizer: Any, path: str) -> Any:
    """The tokenizer, if there is one, with methods whose ValueErrors name the path."""
    if tokenizer is None:
        return None
    messages = {"encode": f"the tokenizer of {path!r}", "decode": f"{path}: the tokenizer cannot decode"}
    for name, message in messages.items():
        setattr(tokenizer, name, library_errors(message)(getattr(tokenizer, name)))
    tokenizer.apply_chat_template = functools.partial(_render_chat, tokenizer.apply_chat_template)
    return tokenizer


def _render_chat(method: Any, *args: Any, **options: Any) -> Any:
    """
    The chat template is somebody else's program; jinja2's sandbox, in which it runs, gives it no access to
    Python or to files. Raises any exception that it causes.
    """
    text = method(*args, **options)
    if len(text) > MAX_TEXT:
        raise ValueError(f"it makes a text of {len(text)} characters; at most {MAX_TEXT} are tokenized")
    return text
