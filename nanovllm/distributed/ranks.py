"""The processes of a tensor-parallel engine: starts the ranks, sends them commands, and sees that all end.

Rank 0 is the user's process. The others are fresh interpreters that import nothing of the user's program, so
a script needs no `if __name__ == "__main__"`. An anonymous pipe carries commands to each rank. When one side
has ended, the other side finds the pipe closed.
"""

import atexit
import contextlib
import os
import pickle
import pkgutil
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from multiprocessing import Pipe, connection, spawn
from pathlib import Path
from typing import Any, NoReturn

import torch

from nanovllm.checkpoints.base import Checkpoint
from nanovllm.config import Config
from nanovllm.distributed.group import Group

SHUT_DOWN = "this engine has been shut down by exit()"


class EngineDeadError(RuntimeError):
    """The engine has ended, by `exit` or because a rank failed, and cannot be used again."""


# The program of a rank. It has rank 0's search path for modules from the first import on, and ends when its
# parent has ended, also while it imports torch or waits for the parent in a collective.
START_RANK = """
import sys
sys.path[:] = sys.argv[1].split("\\n")
import importlib, os, shutil, threading, time
def end_with(parent, folder):
    while os.getppid() == parent:
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
threading.Thread(target=end_with, args=(int(sys.argv[2]), sys.argv[3]), daemon=True).start()
importlib.import_module(sys.argv[4]).serve(int(sys.argv[5]))
"""


class Ranks:
    """
    Rank 0's view of the other ranks. `failure` says why they have ended, if they have; every call raises it.

    A step that has begun on one rank must be finished on all. So rank 0's part runs in a thread of its own,
    where neither Ctrl-C nor another signal's handler can interrupt it; an exception in it ends all ranks.
    """

    module = __name__  # whose `serve` the other processes run

    def __init__(
        self, config: Config, checkpoint: Checkpoint, assembly: str, make_group: Callable[..., Group]
    ):
        self.failure: str | None = None
        self._failed, self._lock = threading.Event(), threading.Lock()
        self._closed = False
        self._process_id = os.getpid()
        self._step: Future | None = None
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._processes: list[subprocess.Popen] = []
        self._pipes: list[connection.Connection] = []
        self._folder = tempfile.mkdtemp(prefix="nanovllm-")
        atexit.register(self.close)
        try:
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast
            size = config.tensor_parallel_size
            num_threads = max(1, torch.get_num_threads() // size)
            self.group = make_group(0, size, self._folder, check=self.check)
            threading.Thread(target=self._work, args=(config, num_threads), daemon=True).start()
            for rank in range(1, size):
                self._start()
                self._send(rank, (config, checkpoint, assembly, (rank, size, self._folder), num_threads))
            threading.Thread(target=self._watch, daemon=True).start()
        except BaseException:
            self.close(at_once=True)
            self._close_pipes()
            raise

    def _start(self) -> None:
        ours, theirs = Pipe()
        self._pipes.append(ours)
        with theirs:
            package = Path(__file__).parents[2]  # in sys.path, maybe relative to an earlier working folder
            search_path = "\n".join(map(str, [*sys.path, package]))
            args = [search_path, os.getpid(), self._folder, self.module, theirs.fileno()]
            command = [spawn.get_executable(), "-c", START_RANK, *map(str, args)]
            # A session of its own: Ctrl-C in a terminal reaches rank 0 only.
            options = dict(pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)
            self._processes.append(subprocess.Popen(command, **options))

    def _send(self, rank: int, message: Any) -> None:
        self._pipes[rank - 1].send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def check(self) -> None:
        """Raise EngineDeadError if a rank has failed."""
        if self.failure is not None:
            raise EngineDeadError(self.failure)

    def call(self, runner: Any, name: str, args: tuple) -> Any:
        """Call a method of the runner on every rank, and return the result of this rank's `runner`."""
        self.check()
        step = Future()
        with self._lock:
            if self._closed:
                raise EngineDeadError(SHUT_DOWN)
            self._step = step
            self._tasks.put((step, runner, name, args))
        while not step.done():
            with contextlib.suppress(TimeoutError):
                return step.result(timeout=1)
            self.check()  # gloo does not always notice that another rank has gone
        return step.result()

    def _work(self, config: Config, num_threads: int) -> None:
        """Rank 0's thread: what every rank's main thread does."""
        torch.set_num_threads(num_threads)
        device = config.device_of(0)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        while (task := self._tasks.get()) is not None:
            self._call(*task)
            task = None  # keep nothing alive while waiting for the next task

    def _call(self, step: Future, runner: Any, name: str, args: tuple) -> None:
        try:
            for rank in range(1, self.group.size):
                self._send(rank, (name, args))
            step.set_result(getattr(runner, name)(*args))
        except BaseException as error:
            cause = self.explained(error)
            self._fail(f"rank 0 failed: {type(cause).__name__}: {cause}")
            step.set_exception(cause)
            del cause, step  # which the exception's traceback would keep alive, and they the exception

    def explained(self, error: BaseException) -> BaseException:
        """The error; or EngineDeadError if another rank has ended, which `_watch` may be about to notice."""
        if not self._failed.wait(1):
            return error
        dead = EngineDeadError(self.failure)
        dead.__cause__ = error
        return dead

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """While rank 0's runner is made. If that fails, end the other ranks and raise what failed on them."""
        try:
            yield
        except BaseException as error:
            try:
                raise self.explained(error) if isinstance(error, RuntimeError) else error
            finally:
                self.group.abort()
                self.close(at_once=True)
                self.group.close()

    def _watch(self) -> None:
        """Wait for the first rank that ends."""
        try:
            ended = connection.wait(self._pipes)
            if not self._closed:
                self._fail(*self._cause([self._pipes.index(each) + 1 for each in ended]))
        finally:
            self._close_pipes()

    def _cause(self, ranks: list[int]) -> tuple[str, str]:
        """Which of these ranks has ended all others; and details, where they are known."""
        return f"rank {ranks[0]} has ended", ""

    def _close_pipes(self) -> None:
        """`close` leaves this to the thread that waits for them."""
        for pipe in self._pipes:
            pipe.close()

    def _fail(self, cause: str, details: str = "") -> None:
        """The first failure ends all ranks; later ones follow from it."""
        with self._lock:
            if self.failure is None and not self._closed:
                self.failure = f"{cause}; the engine has ended with it, make a new one\n{details}".rstrip()
                for process in self._processes:
                    process.kill()
                try:
                    self.group.abort()
                finally:
                    self._failed.set()

    def finish_step(self) -> None:
        """Wait for rank 0's part of a step when Ctrl-C or another exception has ended the wait in `call`."""
        if self._step is not None:
            wait([self._step], timeout=1 if self.failure else 5)
            if not self._step.done():
                self.group.keep_backend()

    def close(self, at_once: bool = False) -> None:
        """End the other ranks. May be called twice; does nothing in a fork of the process that has them."""
        if self._process_id != os.getpid():
            return
        with self._lock:
            self._closed = True
            self._tasks.put(None)
        atexit.unregister(self.close)
        if not at_once:
            self.finish_step()
        for process in self._processes:
            process.kill()
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def serve(pipe_fd: int) -> NoReturn:
    """The main function of a rank other than 0."""
    try:
        run_rank(connection.Connection(pipe_fd))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # does not wait for threads or collectives


def run_rank(commands: connection.Connection) -> NoReturn:
    """Make this rank's runner, and carry out rank 0's commands until rank 0 has ended."""
    config, checkpoint, assembly, place, num_threads = commands.recv()
    torch.set_num_threads(num_threads)
    from nanovllm.engine.model_runner import ModelRunner

    parts = pkgutil.resolve_name(assembly)(config)
    group = parts.make_collectives(*place)
    runner = ModelRunner(config, parts, group)
    runner.start(checkpoint)
    with runner.on_device():
        while True:
            while not commands.poll(1):
                runner.check_device()
            try:
                name, args = commands.recv()
            except EOFError:
                shutil.rmtree(group.folder, ignore_errors=True)
                os._exit(0)
            runner.call(name, *args)
