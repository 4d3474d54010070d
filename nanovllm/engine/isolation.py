"""Lets a request that fails end alone, for callers whose requests must not suffer from one another.

Knows which sequences a step that failed was about, not why it failed. The idea: a step about a single
sequence fails because of it; one about several is tried again in smaller parts.
"""

import traceback
from typing import Any

from nanovllm.distributed.ranks import EngineDeadError
from nanovllm.engine.sequence import Sequence
from nanovllm.text.results import make_result


class Isolation:
    """
    Steps of an engine that raise only what no request is to blame for.

    After a step about several sequences has failed, at most half as many run, and one more with each that
    ends. Meanwhile they are admitted one at a time, so that each has a prefill to itself to fail in. So there
    are no more failures than log2(max_num_seqs) and two for each sequence.
    """

    def __init__(self, engine: Any):
        self.engine = engine
        self.most = self.max_running = engine.scheduler.max_num_seqs

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """`LLMEngine.step`; the sequences of a request that has failed end, and one has the `error`."""
        engine, scheduler = self.engine, self.engine.scheduler
        engine._recover()  # while the scheduler has its own limit
        try:
            if self.max_running < self.most:
                scheduler.max_num_seqs = min(self.max_running, len(scheduler.running) + 1)
            finished, num_tokens = engine._step()
        except EngineDeadError:
            raise
        except Exception as error:
            scheduler.max_num_seqs = self.most
            self._find_culprit(error)
            return [], 0
        finally:
            scheduler.max_num_seqs = self.most
        self.max_running = min(self.max_running + len(finished), self.most)
        return finished, num_tokens

    def _find_culprit(self, error: Exception) -> None:
        engine = self.engine
        engine._check_usable()  # where there are several ranks, a step that fails on one ends the engine
        involved = engine._attempt.sequences
        _free_variables(error)
        engine._recover()
        suspects = [seq for seq in involved if seq.seq_id in engine._requests]
        if len(suspects) == 1:
            self._end(suspects[0], error)
        elif involved and not suspects:
            pass  # all have ended meanwhile: nobody waits for that step
        elif self.max_running > 1:
            self.max_running = min(self.max_running, len(suspects) or self.most) // 2
        else:
            raise error

    def _end(self, culprit: Sequence, error: Exception) -> None:
        """End all completions of the prompt."""
        group = culprit.leader or culprit
        for seq in list(self.engine._requests.values()):
            if seq is group or seq.leader is group:
                self.engine.abort(seq.seq_id)
        culprit.finish_reason, culprit.error = "error", error


def outcome(tokenizer: Any, completions: list[Sequence]) -> dict[str, Any] | Exception:
    """The result of a prompt from its completions, which have ended, or the error that it has instead."""
    errors = [seq.error for seq in completions if seq.error is not None]
    try:
        return errors[0] if errors else make_result(tokenizer, completions)
    except Exception as error:  # a decoder's
        return error


def _free_variables(error: BaseException | None) -> None:
    """Let go of the tensors in a failed step's functions, which live as long as the error's traceback."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
