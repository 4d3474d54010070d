"""Conversations as text, which the checkpoint's chat template writes. What is given has been checked."""

import re
from collections.abc import Iterable, Set
from typing import Any

from nanovllm.utils.validation import check

PROBE = "a text to find again"
OTHER_MEDIA = re.compile("image|video|audio")  # in types of parts

Messages = Iterable[dict[str, Any]]


def as_conversations(messages: Any) -> list[Any]:
    """One conversation or a list of them as a list."""
    found = as_list(messages)
    is_list = bool(found) and isinstance(found[0], (dict, list, tuple))
    check(is_list, "messages must be a conversation or a list of conversations", messages)
    return [found] if isinstance(found[0], dict) else found


def render(
    tokenizer: Any,
    model: str,
    chats: list[list[dict[str, Any]]],
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    chat_template_content_format: str = "auto",
    **options: Any,
) -> list[str]:
    """The texts of conversations, see `LLM.chat`. Raises ValueError."""
    if tokenizer is None or (chat_template or tokenizer.chat_template) is None:
        raise ValueError(f"the tokenizer of {model!r} has no chat template")
    _check_media(chats)
    form = chat_template_content_format
    has_parts = any(isinstance(message["content"], list) for chat in chats for message in chat)
    if form == "openai":
        chats = [[_with_parts(message) for message in chat] for chat in chats]
    elif has_parts and (form == "string" or not _takes_parts(tokenizer, chat_template)):
        chats = [[_without_parts(m, f"conversation {i}") for m in chat] for i, chat in enumerate(chats)]
    options = {"add_generation_prompt": True, **options, **(chat_template_kwargs or {})}
    options["chat_template"] = chat_template
    texts = []
    for i, conversation in enumerate(chats):
        try:
            texts.append(tokenizer.apply_chat_template(conversation, tokenize=False, **options))
        except Exception as error:  # whatever a template raises
            raise ValueError(f"the chat template does not accept conversation {i}: {error}") from error
    return texts


def _check_media(chats: list[list[dict[str, Any]]]) -> None:
    for i, chat in enumerate(chats):
        for message in chat:
            for part in message["content"] if isinstance(message["content"], list) else ():
                is_text = not isinstance(part, dict) or not OTHER_MEDIA.search(str(part.get("type")))
                check(is_text, f"conversation {i}: models here read text alone", part)


def _takes_parts(tokenizer: Any, chat_template: str | None) -> bool:
    """Whether the template writes the text of a part, and not the part as Python shows it."""
    chat = [{"role": "user", "content": [{"type": "text", "text": PROBE}]}]
    try:
        text = tokenizer.apply_chat_template(chat, chat_template=chat_template, tokenize=False)
    except Exception:  # whatever a template raises that wants a string
        return False
    return PROBE in text and not any(quote + PROBE in text for quote in "'\"")


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _without_parts(message: dict[str, Any], name: str) -> dict[str, Any]:
    content = message["content"]
    if not isinstance(content, list):
        return message
    texts = [part.get("text") if isinstance(part, dict) else part for part in content]
    rule = f"{name}: the chat template wants a string, so all parts of a content must be texts"
    for text, part in zip(texts, content, strict=True):
        check(isinstance(text, str), rule, part)
    return message | {"content": "\n".join(texts)}


def as_list(values: Any) -> list | tuple | None:
    """
    The items of any ordered collection, such as a generator, an array or a column of a table; None for all
    else, such as texts, dicts, tables and sets.
    """
    if isinstance(values, Iterable) and hasattr(values, "tolist"):  # arrays, tensors, a pandas Series
        values = values.tolist()
    if isinstance(values, (list, tuple)):
        return values
    is_other = isinstance(values, (str, bytes, bytearray, Set)) or hasattr(type(values), "keys")
    return list(values) if isinstance(values, Iterable) and not is_other else None
