"""Restarts the requests of a step that was broken off, and ends the one that makes steps fail.

Knows which sequences a failed step was about, not why it failed. The idea: a step about a single sequence
fails because of it; one about several is tried again in smaller parts.
"""

import traceback
from typing import Any

from nanovllm.distributed.ranks import EngineDeadError
from nanovllm.engine.interfaces import Observer
from nanovllm.engine.sequence import Sequence
from nanovllm.extensions.safety.admission import AdmissionControl
from nanovllm.extensions.safety.stats import StatsLLM


class Recovery(Observer):
    """
    The engine drops all requests after a call that was broken off, at whatever line. This one has it keep
    them: those that had not ended before are queued again with the tokens they had.
    """

    def __init__(self, admission: AdmissionControl):
        self.admission = admission

    def started(self, engine: Any) -> None:
        self.engine, engine.step_or_isolate = engine, self.step

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """
        `LLMEngine.step`, in which a request that makes steps fail ends alone: only what no request is to
        blame for is raised.
        """
        try:
            return StatsLLM.step(self.engine)
        except EngineDeadError:
            raise
        except Exception as error:
            self.engine.check_usable()  # with several ranks, a step that fails on one of them ends the engine
            self.isolate_failing_request(error)
            return [], 0

    def ended(self, seq: Sequence) -> None:
        if not self.engine.unfinished:
            self.admission.max_running = self.admission.max_num_seqs

    def failed(self, step: Any) -> list[Sequence]:
        engine = self.engine
        kept = [seq for seq in engine.unfinished.values() if seq not in engine.ended]
        for seq, position in step.drawing.items():
            if seq in kept:
                del seq.token_ids[position:]
        self.admission.max_running = self.admission.max_num_seqs
        return kept

    def isolate_failing_request(self, error: Exception) -> None:
        """
        After a step that failed, end the request that is to blame. If several may be, let at most half as
        many run from now on, which are admitted one at a time, and one more with each that ends. So there are
        at most log2(max_num_seqs) failures, and two for each sequence. Raises the error if no request is to
        blame for it.
        """
        engine, max_running = self.engine, self.admission.max_running
        _free_variables(error)
        involved = []
        if (step := engine.attempt) is not None:
            sequence = getattr(error, "sequence", None)
            involved = step.sequences if sequence is None else [sequence]
            engine.recover()
        suspects = [seq for seq in involved if seq.seq_id in engine.unfinished]
        self.admission.max_running = max_running
        if len(suspects) == 1:
            [culprit] = suspects
            for seq in list(engine.unfinished.values()):
                if seq.request.own is culprit.request.own:  # all completions of the prompt
                    engine.abort(seq.seq_id)
            culprit.finish_reason, culprit.request.own["error"] = "error", error
        elif suspects or not involved:  # else all have ended meanwhile: nobody waits for that step
            if max_running == 1:
                raise error
            self.admission.max_running = min(max_running, len(suspects) or max_running) // 2


def _free_variables(error: BaseException | None) -> None:
    """Let go of the tensors in a failed step's functions, which live as long as the error's traceback."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
