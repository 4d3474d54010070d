"""Conversations as text, which the checkpoint's chat template writes. What is given has been checked."""

import contextlib
import json
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
    form = chat_template_content_format
    has_parts = any(isinstance(message.get("content"), list) for chat in chats for message in chat)
    if form == "auto" and has_parts and not _takes_parts(tokenizer, chat_template):
        form = "string"
    options = {"add_generation_prompt": True, **options, **(chat_template_kwargs or {})}
    options["chat_template"] = chat_template
    texts = []
    for i, chat in enumerate(chats):
        given = [_in_form(form, message, f"conversation {i}") for message in chat]
        for conversation in [[*map(_with_objects, given)], given]:  # few templates want JSON
            try:
                texts.append(tokenizer.apply_chat_template(conversation, tokenize=False, **options))
                break
            except Exception as error:  # whatever a template raises
                problem = error
        else:
            raise ValueError(f"the chat template does not accept conversation {i}: {problem}") from problem
    return texts


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """The message with objects as arguments of tool calls, where OpenAI's have JSON."""
    calls = message.get("tool_calls")
    found = []
    for call in calls if isinstance(calls, list) else ():
        with contextlib.suppress(TypeError, ValueError, LookupError, RecursionError):  # whatever it is
            arguments = json.loads(call["function"]["arguments"])
            call = call | {"function": call["function"] | {"arguments": arguments}}
        found.append(call)
    return message | {"tool_calls": found} if found else message


def _takes_parts(tokenizer: Any, chat_template: str | None) -> bool:
    """Whether the template writes the text of a part, and not the part as Python shows it."""
    chat = [{"role": "user", "content": [{"type": "text", "text": PROBE}]}]
    try:
        text = tokenizer.apply_chat_template(chat, chat_template=chat_template, tokenize=False)
    except Exception:  # whatever a template raises that wants a string
        return False
    return PROBE in text and not any(quote + PROBE in text for quote in "'\"")


def _in_form(form: str, message: dict[str, Any], name: str) -> dict[str, Any]:
    """The message with a content of this form: a "string", parts ("openai"), or as it was given ("auto")."""
    content = message.get("content")
    if isinstance(content, str) and form == "openai":
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return message
    for part in content:
        is_text = not isinstance(part, dict) or not OTHER_MEDIA.search(str(part.get("type")))
        check(is_text, f"{name}: models here read text alone", part)
    if form == "string":
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        rule = f"{name}: the chat template wants a string, so all parts of a content must be texts"
        for text, part in zip(texts, content, strict=True):
            check(isinstance(text, str), rule, part)
        content = "\n".join(texts)
    return message | {"content": content}


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
