"""The processes of a tensor-parallel engine: starts the ranks, sends them commands, and sees that all end.

Rank 0 is the user's process. The others are fresh interpreters that import nothing of the user's program, so
a script needs no `if __name__ == "__main__"`. Commands come to each as its standard input. When one side has
ended, the other side finds this pipe closed.
"""

import atexit
import contextlib
import os
import pickle
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from multiprocessing import Pipe, connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from nanovllm.checkpoints.folder import Checkpoint
from nanovllm.distributed.group import Group

SHUT_DOWN = "this engine has been shut down by exit()"
ENDED = "; the engine has ended with it, make a new one"


class EngineDeadError(RuntimeError):
    """The engine has ended, by `exit` or because a rank failed, and cannot be used again."""


# The program of a rank. It has rank 0's search path for modules from the first import on, and ends when its
# parent has ended, also while it imports torch or waits for the parent in a collective.
START_RANK = """
import sys
sys.path[:] = sys.argv[1].split("\\n")
import importlib, os, shutil, threading, time, traceback
from multiprocessing.connection import Connection
def end_with(parent, folder):
    while os.getppid() == parent:
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
folder = sys.argv[3]
threading.Thread(target=end_with, args=(int(sys.argv[2]), folder), daemon=True).start()
commands = Connection(os.dup(0))  # not for programs that this one starts
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
try:
    importlib.import_module(sys.argv[4]).serve(commands, int(sys.argv[5]), folder)
except BaseException:
    time.sleep(0.5)  # this was all, if the error comes of the parent's end
    traceback.print_exc()
    os._exit(1)  # does not wait for threads or collectives
"""


class Ranks:
    """
    Rank 0's view of the other ranks. `failures` says why they have ended, if they have; every call raises the
    first, of which the others follow.

    A step that has begun on one rank must be finished on all. So rank 0's part runs in a thread of its own,
    where neither Ctrl-C nor another signal's handler can interrupt it; an exception in it ends all ranks.
    """

    def __init__(self, size: int, make_group: Callable[..., Group]):
        self.failures: list[str] = []
        self._process_id = os.getpid()
        self._processes: list[subprocess.Popen] = []
        self._pipes: list[connection.Connection] = []
        self._tasks = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._folder = tempfile.mkdtemp(prefix="nanovllm-")  # readable by this user only
        atexit.register(self.close)
        store = dist.FileStore(f"{self._folder}/store")
        self.group = make_group(0, size, store, check=self.check)

    def start(self, runner: Any, checkpoint: Checkpoint, assembly: Callable) -> None:
        """Start the other ranks, and rank 0's runner at the same time. Raises what fails on any rank."""
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast
        num_threads = max(1, torch.get_num_threads() // self.group.size)
        for rank in range(1, self.group.size):
            self._start_process(rank)
        self._send((type(runner), runner.config, checkpoint, assembly, num_threads))
        self._watcher.start()
        with self._explained():
            runner.start(checkpoint)
        worker = threading.Thread(target=self._work, args=(runner, num_threads), daemon=True)
        worker.start()
        self._worker = worker

    def _start_process(self, rank: int) -> None:
        package = Path(__file__).parents[2]  # in sys.path, maybe relative to an earlier working folder
        search_path = "\n".join(map(str, [*sys.path, package]))
        # Which calls the `serve` of the module that this class is from.
        args = [search_path, self._process_id, self._folder, self.__module__, rank]
        command = [sys.executable, "-c", START_RANK, *map(str, args)]
        ours, theirs = Pipe()
        self._pipes.append(ours)
        with theirs:
            # A session of its own: Ctrl-C in a terminal reaches rank 0 only.
            process = subprocess.Popen(command, stdin=theirs, start_new_session=True)
        self._processes.append(process)

    def _send(self, message: Any) -> None:
        """Send all other ranks the same."""
        message = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with contextlib.suppress(OSError):  # of a rank that has ended, which `_watch` notices
            for pipe in self._pipes:
                pipe.send_bytes(message)

    def check(self) -> None:
        """Raise EngineDeadError if the ranks have ended."""
        if self.failures:
            raise EngineDeadError(self.failures[0])

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """If this fails because another rank has ended, raise an EngineDeadError that says so."""
        try:
            yield
        except RuntimeError:
            self._watcher.join(1)  # which may be about to notice
            self.check()
            raise

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of the runner on every rank. Returns rank 0's result."""
        self.check()
        step = futures.Future()
        self._tasks.put((step, name, args))
        while True:
            with contextlib.suppress(futures.TimeoutError):
                return step.result(timeout=1)
            self.check()  # gloo does not always notice that another rank has gone

    def _work(self, runner: Any, num_threads: int) -> None:
        """Rank 0's thread: what every rank's main thread does; and in the end, free the device's memory."""
        torch.set_num_threads(num_threads)
        with runner.on_device():
            while (task := self._tasks.get()) is not None:
                self._call(runner, *task)
                task = None  # keep nothing alive while waiting for the next task
        runner.exit()

    def _call(self, runner: Any, step: futures.Future, name: str, args: tuple) -> None:
        try:
            with self._explained():
                self._send((name, *args))
                step.set_result(getattr(runner, name)(*args))
        except BaseException as error:
            self._fail(f"rank 0 failed: {type(error).__name__}: {error}{ENDED}")
            step.set_exception(error)
            del step  # which the exception's traceback would keep alive, and it the exception

    def _watch(self) -> None:
        """Wait for the first rank that ends."""
        ended = connection.wait(self._pipes)
        if not self.failures:
            self._fail(f"rank {self._pipes.index(ended[0]) + 1} has ended{ENDED}")

    def _fail(self, failure: str) -> None:
        """One failure ends all ranks."""
        self.failures.append(failure)
        for process in self._processes:
            process.kill()
        self.group.abort()

    def close(self) -> None:
        """
        Free the device's memory and end the other ranks. May be called twice; does nothing in a fork of the
        process that has them.
        """
        if self._process_id != os.getpid():
            return
        atexit.unregister(self.close)
        self._tasks.put(None)
        if self._worker is not None:  # it may have a step to finish; where another rank has gone it never may
            self._worker.join(1 if self.failures else 5)
        self.failures.append(SHUT_DOWN)
        for process in self._processes:
            process.kill()
            process.wait()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self.group.close()


def serve(commands: connection.Connection, rank: int, folder: str) -> NoReturn:
    """What a rank other than 0 does: it makes its runner and carries out rank 0's commands."""
    make_runner, config, checkpoint, assembly, num_threads = commands.recv()
    torch.set_num_threads(num_threads)
    parts = assembly(config)
    store = dist.FileStore(f"{folder}/store")
    group = parts.make_collectives(rank, config.tensor_parallel_size, store)
    runner = make_runner(config, parts, group)
    runner.start(checkpoint)
    while True:
        while not commands.poll(1):
            if runner.device.type == "cuda":  # raise an error of the device, for which nobody waits here
                torch.cuda.default_stream(runner.device).query()
        runner.call(*commands.recv())
