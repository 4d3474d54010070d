"""What guards the engine's calls: one at a time, in the process that made it, with names that callers
choose for their requests.

None of it stands on the path of a step. `step` is replaced while it has more to do, and a fork's engine gets
methods of its own when it forks.
"""

import functools
import importlib
import os
import sys
import weakref
from typing import Any

from nanovllm import distributed, utils
from nanovllm.distributed.ranks import EngineDeadError
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.extensions.api.argparse_utils import FlexibleArgumentParser
from nanovllm.extensions.api.cleanup import cleanup_dist_env_and_memory
from nanovllm.extensions.api.engine_args import show_options
from nanovllm.extensions.api.foreign_options import MISSING_METHODS, takes_foreign
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.validation import check, is_number

# Names of `nanovllm` that scripts import, and the modules that have them, imported when they are asked for.
PLACES = {
    "AsyncLLM": "nanovllm.extensions.api.async_llm",
    "CompletionOutput": "nanovllm.outputs",
    "EngineArgs": "nanovllm.extensions.api.engine_args",
    "RequestOutput": "nanovllm.outputs",
    "StructuredOutputsParams": "nanovllm.sampling_params",
    "TextPrompt": "nanovllm.inputs",
    "TokensPrompt": "nanovllm.inputs",
}
NOT_PICKLED = "an engine cannot be pickled or copied: make one in each process that uses one, or share one \
among the tasks of a process with AsyncLLM"
# Where scripts for vLLM look for them.
distributed.cleanup_dist_env_and_memory = cleanup_dist_env_and_memory
utils.FlexibleArgumentParser = FlexibleArgumentParser
SamplingParams.__init__ = takes_foreign(SamplingParams.__init__)
_engines: "weakref.WeakSet[ApiLLM]" = weakref.WeakSet()  # those of this process


def _find_name(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
    return getattr(importlib.import_module(PLACES[name]), name)


package = sys.modules["nanovllm"]  # which is being imported
package.__all__ += PLACES
package.__getattr__ = _find_name


def _leave_engines() -> None:
    """In a fork: the engines belong to the process that made them, and their threads are not here."""
    for engine in list(_engines):
        engine.check_usable = functools.partial(_refuse, engine._process_id)
        engine.clear = engine.exit = lambda: None


def _refuse(owner: int) -> None:
    raise EngineDeadError(
        f"this engine belongs to process {owner}, and this is process {os.getpid()}, a "
        "fork of it: make an engine in the process that is to use it"
    )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_engines)


class NotCopied:
    """An engine, or what has one."""

    def __getattr__(self, name: str) -> Any:
        rest = f": {MISSING_METHODS[name]}" if name in MISSING_METHODS else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{rest}")

    def __reduce__(self) -> Any:
        raise TypeError(NOT_PICKLED)


class ApiLLM(NotCopied, LLMEngine):
    """It belongs to the process that made it, and does one call at a time; `AsyncLLM` serves many tasks."""

    _call = None  # the one that the unfinished requests belong to, see _take_turn

    def __init__(self, model: str | os.PathLike, **options: Any):
        self._own_ids: dict[int | str, int | str] = {}  # caller's id -> engine's, and the other way round
        self._process_id = os.getpid()
        _engines.add(self)
        super().__init__(model, **options)

    def add_request(
        self, prompt: Any, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> int | str:
        """
        `LLMEngine.add_request`. The id may be the caller's own: a text that no unfinished request has. Raises
        RuntimeError while the requests of another call are unfinished.
        """
        self._take_turn()
        if request_id is None:
            return super().add_request(prompt, sampling_params)
        check(isinstance(request_id, str), "request_id must be a text", request_id)
        if self._own_ids.get(request_id) in self.unfinished:
            raise ValueError(
                f"request_id must be a new one, got that of an unfinished request: {request_id!r}"
            )
        if self.is_finished():
            self._own_ids.clear()
        seq_id = super().add_request(prompt, sampling_params)
        self._own_ids |= {request_id: seq_id, seq_id: request_id}
        self._watch_steps()
        return request_id

    def abort(self, request_id: int | str) -> None:
        """`LLMEngine.abort`."""
        self.check_usable()
        if isinstance(request_id, str):
            request_id = self._own_ids.get(request_id, request_id)
        check(is_number(request_id, int), "request_id must be an integer", request_id)  # 1.0 would find 1
        super().abort(request_id)

    def _take_turn(self, call: dict[int, Any] | None = None) -> None:
        """
        Only one call at a time may use the engine, until its requests have ended. A call is identified by its
        dict of queued requests; None stands for `add_request` and `step`.
        """
        self.check_usable()
        if self._call is not call:
            if self.unfinished:
                raise RuntimeError(
                    "the engine is not idle: busy with the unfinished requests of another call. AsyncLLM "
                    "takes many calls at once; or make another engine, in a process of its own"
                )
            self._call = call
            self._watch_steps()

    def _watch_steps(self) -> None:
        """Have `step` look after turns and own ids if there are any."""
        self.__dict__.pop("step", None)
        if self._call is not None or self._own_ids:
            self.step = functools.partial(ApiLLM._step_in_turn, weakref.proxy(self))

    def _step_in_turn(self) -> tuple[list[tuple[int | str, list[int]]], int]:
        """`LLMEngine.step`. Raises RuntimeError while the requests of another call are unfinished."""
        self._take_turn()
        finished, num_tokens = super().step()
        return [(self._own_ids.get(i, i), token_ids) for i, token_ids in finished], num_tokens


def with_api(llm: type[LLMEngine], *bases: type[LLMEngine]) -> type[LLMEngine]:
    """The engine with what these bases add, whose calls take options of vLLM as well, one call at a time."""
    made = type(llm.__name__, (ApiLLM, *bases, llm), {"__doc__": llm.__doc__, "__module__": llm.__module__})
    for name in ("generate", "generate_iter", "stream", "chat"):
        setattr(made, name, takes_foreign(getattr(made, name)))
    return show_options(made)
