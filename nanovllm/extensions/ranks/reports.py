"""Why a rank has ended: a rank that fails answers rank 0's commands with when and how it did.

The first to fail is the cause of the others' errors, which come later. A rank that was killed writes nothing;
then the status of its process says by what.
"""

import contextlib
import os
import signal
import subprocess
import time
import traceback
from multiprocessing import connection
from typing import NoReturn

from nanovllm.distributed.ranks import Ranks, run_rank


class ReportingRanks(Ranks):
    module = __name__

    def _cause(self, ranks: list[int]) -> tuple[str, str]:
        """How the first of them has ended, and its traceback."""
        _, cause, details = min(map(self._read_report, ranks))
        return cause, details

    def _read_report(self, rank: int) -> tuple[float, str, str]:
        try:
            when, cause, details = self._pipes[rank - 1].recv()
        except (EOFError, OSError):
            when, cause, details = 0.0, _describe_end(self._processes[rank - 1]), ""
        return when, f"rank {rank} {cause}", details


def serve(pipe_fd: int) -> NoReturn:
    """The main function of a rank other than 0."""
    pipe = connection.Connection(pipe_fd)
    try:
        run_rank(pipe)
    except BaseException as error:
        cause = f"failed: {type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            pipe.send((time.monotonic(), cause, traceback.format_exc()))
        time.sleep(1)  # rank 0 kills this process, or has ended
        os._exit(1)  # does not wait for threads or collectives


def _describe_end(process: subprocess.Popen) -> str:
    try:
        status = process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return "closed its report"
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
