"""Calls what may recurse deeper than the stack of an ordinary thread allows."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Value = TypeVar("Value")
_setting_stack_size = threading.Lock()  # the size holds for every thread that starts meanwhile


def call_with_stack(function: Callable[[], Value], num_bytes: int, seconds: float) -> Value:
    """
    `function()`, called in a thread with a stack of its own; only what it touches of it takes memory. Raises
    concurrent.futures.TimeoutError when the seconds are over: the thread cannot be ended, and works on.
    """
    future: Future[Value] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    with _setting_stack_size:
        before = threading.stack_size(num_bytes)
        try:
            threading.Thread(target=run, daemon=True).start()
        finally:
            threading.stack_size(before)
    return future.result(seconds)
