"""Undoes a step that was broken off, and ends the request that makes steps fail.

Works on the requests of an `LLMEngine`, which it is given. Knows which sequences a failed step was about, not
why it failed. The idea: a step about a single sequence fails because of it; one about several is tried again
in smaller parts.
"""

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nanovllm.distributed.ranks import EngineDeadError
from nanovllm.engine.sequence import Sequence
from nanovllm.extensions.safety.isolation import Isolation
from nanovllm.text.results import watch_stops


@dataclass
class Attempt:
    """A step, or another change of the engine's requests, that has begun; and what is needed to undo it."""

    sequences: list[Sequence] = field(default_factory=list)  # which it works on now: one may be to blame
    drawing: list[Sequence] = field(default_factory=list)  # whose next token is being recorded
    lengths: list[int] = field(default_factory=list)  # the number of tokens they had before


@contextlib.contextmanager
def attempting(engine: Any, reports: bool = False) -> Iterator[Attempt]:
    """
    Change the engine's requests. An attempt that is broken off, at whatever line, is undone by the next one.
    With `reports` the caller reports those that have ended: the engine forgets them at the end.
    """
    recover(engine)
    engine.attempt = Attempt()
    yield engine.attempt
    engine.ended, engine.attempt = {} if reports else engine.ended, None


def recover(engine: Any) -> list[Sequence]:
    """
    Undo the last attempt if it was broken off, and return the sequences that it was working on. What it has
    written to the KV cache is unknown, so nothing in the cache is kept: all requests that had not ended
    before are queued again with the tokens they had.
    """
    if (attempt := engine.attempt) is None:
        return []
    engine.under_way = None
    if engine.model_runner is not None:  # not shut down in the middle of its work
        try:
            engine.model_runner.call("reset")
            engine.batches.reset()
        except Exception as error:
            raise EngineDeadError(f"the engine cannot go on after a step that failed: {error}") from error
    for seq_id in engine.ended:
        engine.unfinished.pop(seq_id, None)
    for seq, length in zip(attempt.drawing, attempt.lengths, strict=False):
        if seq.seq_id in engine.unfinished:
            del seq.token_ids[length:]
    engine.scheduler.restart(engine.unfinished.values())
    isolation_of(engine).all_ended()
    engine.texts = watch_stops(engine.tokenizer, engine.unfinished.values())
    engine.attempt = None
    return attempt.sequences


def end_culprit(engine: Any, error: Exception) -> None:
    """
    After a step that failed, end the request that is to blame. If several may be, let at most half as many
    run from now on, which are admitted one at a time, and one more with each that ends. So there are at most
    log2(max_num_seqs) failures, and two for each sequence. Raises the error if no request is to blame for it.
    """
    isolation = isolation_of(engine)
    max_running = isolation.max_running
    _free_variables(error)
    involved = recover(engine)
    suspects = [seq for seq in involved if seq.seq_id in engine.unfinished]
    isolation.max_running = max_running
    if len(suspects) == 1:
        culprit = suspects[0]
        group = culprit.leader or culprit
        for seq in list(engine.unfinished.values()):
            if seq is group or seq.leader is group:  # all completions of the prompt
                engine.abort(seq.seq_id)
        culprit.finish_reason, culprit.error = "error", error
    elif suspects or not involved:  # else all have ended meanwhile: nobody waits for that step
        if max_running == 1:
            raise error
        isolation.max_running = min(max_running, len(suspects) or max_running) // 2


def isolation_of(engine: Any) -> Isolation:
    return next(part for part in engine.scheduler.admissions if isinstance(part, Isolation))


def _free_variables(error: BaseException | None) -> None:
    """Let go of the tensors in a failed step's functions, which live as long as the error's traceback."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
