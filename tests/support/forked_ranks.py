"""Ranks that start at once, for modules that import the fixture: forks of a process that is ready to be one.

A rank is a fresh interpreter, which takes two seconds of a CPU to import torch, and five where transformers
builds its model. That users' ranks start so is tested in tests/distributed; elsewhere it only takes time.
"""

import contextlib
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

# Becomes a rank with the program, the arguments and the standard input that it is sent, as often as asked.
SERVER = """
import os, socket, sys
sys.path[:] = sys.argv[1].split("\\n")
import nanovllm.llm, transformers.masking_utils, transformers.modeling_layers
server = socket.socket(fileno=0)
while True:
    message, files, _, _ = socket.recv_fds(server, 1 << 20, 1)
    if not message:
        break
    program, *arguments = message.decode().split("\\0")
    if pid := os.fork():
        os.close(*files)
        server.send(str(pid).encode())
        continue
    os.setsid()
    os.dup2(*files, 0)
    os.close(*files)
    sys.argv[1:] = arguments
    sys.argv[2] = str(os.getppid())  # with which it ends
    exec(program, {"__name__": "__main__"})
"""


@functools.cache
def start_server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-c", SERVER, "\n".join([os.getcwd(), *sys.path])]
        subprocess.Popen(command, stdin=theirs)  # ends when this process does, and closes the socket
    return ours


class ForkedRank:
    """As much of a `subprocess.Popen` as an engine needs."""

    def __init__(self, command: list[str], stdin, start_new_session: bool):
        server, message = start_server(), "\0".join(command[2:]).encode()
        socket.send_fds(server, [message], [stdin.fileno()])
        self.process = os.pidfd_open(int(server.recv(100)))
        weakref.finalize(self, os.close, self.process)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, signal.SIGKILL)

    def wait(self) -> None:
        select.select([self.process], [], [])


@pytest.fixture(scope="module", autouse=True)
def forked_ranks():
    """Not beside a GPU, of which no fork may know, nor where there are no such numbers of processes."""
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(os, "pidfd_open") and not torch.cuda.is_available():
            patch.setattr("nanovllm.distributed.ranks.subprocess", SimpleNamespace(Popen=ForkedRank))
        yield
