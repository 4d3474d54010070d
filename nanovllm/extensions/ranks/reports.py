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
from multiprocessing.connection import Connection
from typing import NoReturn

from nanovllm.distributed import ranks


class ReportingRanks(ranks.Ranks):
    def _watch(self) -> None:
        """Wait for the first rank that ends, and tell how, with its traceback."""
        connection.wait(self._pipes)
        time.sleep(0.1)  # the first that is noticed need not be the first that has ended
        if not self.failures:
            _, cause, details = min(map(self._read_report, connection.wait(self._pipes)))
            self._fail(f"{cause}{ranks.ENDED}\n{details}".rstrip())

    def _read_report(self, pipe: Connection) -> tuple[float, str, str]:
        rank = self._pipes.index(pipe) + 1
        try:
            when, cause, details = pipe.recv()
        except (EOFError, OSError):
            when, cause, details = 0.0, _describe_end(self._processes[rank - 1]), ""
        return when, f"rank {rank} {cause}", details


def serve(commands: Connection, rank: int, folder: str) -> NoReturn:
    """What a rank other than 0 does."""
    try:
        ranks.serve(commands, rank, folder)
    except BaseException as error:
        cause = f"failed: {type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            commands.send((time.monotonic(), cause, traceback.format_exc()))
        time.sleep(1)  # rank 0 kills this process, or has ended
        os._exit(1)  # does not wait for threads or collectives


def _describe_end(process: subprocess.Popen) -> str:
    try:
        status = process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return "closed its report"
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
