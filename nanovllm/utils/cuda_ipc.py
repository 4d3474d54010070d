"""GPU memory that several processes of one host have mapped, through the CUDA runtime's IPC calls.

Of all that CUDA offers for this it is what every version has and what needs nothing but a handle of 64 bytes
to be passed on: no server, no socket, no file.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


class SharedBuffer:
    """
    `buffer` is int32 [num_words] on this rank's GPU; `addresses` says for each rank where its buffer begins
    in this process. `gather` gives every rank's value of an integer. Raises RuntimeError.

    Memory of a rank that has died stays valid for those who have mapped it.
    """

    def __init__(self, num_words: int, rank: int, device: torch.device, gather: Callable[[int], list[int]]):
        self._runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")  # torch has loaded it
        self._device = device
        own, handle = ctypes.c_void_p(), Handle()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # creates the context, if nothing has yet
            self._call("cudaMalloc", ctypes.byref(own), ctypes.c_size_t(4 * num_words))
            self._call("cudaIpcGetMemHandle", ctypes.byref(handle), own)
            handles = gather(int.from_bytes(bytes(handle), "little"))
            self.addresses = [
                self._open(value) if i != rank else own.value for i, value in enumerate(handles)
            ]
        self._rank = rank
        self.__cuda_array_interface__ = {
            "data": (own.value, False),
            "shape": (num_words,),
            "typestr": "<i4",
            "version": 3,
        }
        self.buffer = torch.as_tensor(self, device=device)

    def _open(self, value: int) -> int:
        address = ctypes.c_void_p()
        handle = Handle.from_buffer_copy(value.to_bytes(HANDLE_BYTES, "little"))
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), handle, ctypes.c_uint(LAZY_PEER_ACCESS))
        return address.value

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._runtime, name)(*args)
        if status:
            self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"{name} failed: {self._runtime.cudaGetErrorString(status).decode()}")

    def close(self) -> None:
        """Give the memory back. Nothing that uses it may be running."""
        with torch.cuda.device(self._device):
            for rank, address in enumerate(self.addresses):
                self._call(
                    "cudaFree" if rank == self._rank else "cudaIpcCloseMemHandle", ctypes.c_void_p(address)
                )
        self.addresses = []
