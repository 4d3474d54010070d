"""Lets a request that fails end alone, for callers whose requests must not suffer from one another.

Knows which sequences a step that failed was about, not why it failed. The idea: a step about a single
sequence fails because of it; one about several is tried again in smaller parts.
"""

import traceback
from typing import Any


def end_culprit(engine: Any, error: Exception) -> None:
    """
    After an engine's step that failed, end the request that is to blame; or else, of those that may be, let
    at most half as many run. Then they are admitted one at a time, and one more with each that ends, so that
    there are no more failures than log2(max_num_seqs) and two for each sequence. Raises the error if no
    request is to blame for it.
    """
    scheduler = engine.scheduler
    max_running = scheduler.max_running
    _free_variables(error)
    involved = engine.recover()
    suspects = [seq for seq in involved if seq.seq_id in engine.unfinished]
    scheduler.max_running = max_running
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
        scheduler.max_running = min(max_running, len(suspects) or max_running) // 2


def _free_variables(error: BaseException | None) -> None:
    """Let go of the tensors in a failed step's functions, which live as long as the error's traceback."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
