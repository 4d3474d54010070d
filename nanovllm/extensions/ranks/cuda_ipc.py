"""GPU memory that all ranks of a host have mapped, through the CUDA runtime's IPC calls.

Of CUDA's ways to share memory this is the one that every version has, and a process only has to pass a handle
of 64 bytes on to the others.
"""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = ctypes.c_uint(1)  # cudaIpcMemLazyEnablePeerAccess


class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


class SharedBuffer:
    """
    If `is_mapped`, `buffer` is int32 [num_words] on this rank's GPU, and `addresses` says where the buffer of
    each rank is in this process. `gather` sends an integer to all ranks and returns every rank's.

    The memory of a rank that has died stays valid where it is mapped.
    """

    def __init__(self, num_words: int, rank: int, device: torch.device, gather: Callable[[int], list[int]]):
        self._runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")  # torch has loaded it
        self._device = device
        self._own, handle = ctypes.c_void_p(), Handle()
        self._others: list[ctypes.c_void_p] = []
        self.addresses: list[int] = []
        self.is_mapped = False
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # creates the CUDA context if there is none yet
            failed = self._call("Malloc", ctypes.byref(self._own), ctypes.c_size_t(4 * num_words))
            failed = failed or self._call("IpcGetMemHandle", ctypes.byref(handle), self._own)
            handles = gather(0 if failed else int.from_bytes(bytes(handle), "little"))
            if not all(handles):
                return
            for i, value in enumerate(handles):
                address = self._own
                if i != rank:
                    address = ctypes.c_void_p()
                    handle = Handle.from_buffer_copy(value.to_bytes(HANDLE_BYTES, "little"))
                    if self._call("IpcOpenMemHandle", ctypes.byref(address), handle, LAZY_PEER_ACCESS):
                        return
                    self._others.append(address)
                self.addresses.append(address.value)
        array = {"data": (self._own.value, False), "shape": (num_words,), "typestr": "<i4", "version": 3}
        buffer = SimpleNamespace(__cuda_array_interface__=array)
        self.buffer = torch.as_tensor(buffer, device=device)
        self.is_mapped = True

    def _call(self, name: str, *args: Any) -> int:
        """Call the CUDA runtime. Returns 0 or an error, which is cleared so that no later call reports it."""
        status = getattr(self._runtime, f"cuda{name}")(*args)
        if status:
            self._runtime.cudaGetLastError()
        return status

    def close(self) -> None:
        """
        Free the memory. No kernel that uses it may be running on this rank, and the other ranks must have
        ended: memory that another process has mapped must not be freed.
        """
        with torch.cuda.device(self._device):
            for address in self._others:
                self._call("IpcCloseMemHandle", address)
            self._call("Free", self._own)
        self._others, self._own = [], ctypes.c_void_p()
