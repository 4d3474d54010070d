"""GPU memory that the processes of one host have all mapped, through the CUDA runtime's IPC calls.

Of what CUDA offers for this it is the part that every version has and that needs nothing but a handle of 64
bytes to be passed on: no server, no socket, no file.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = ctypes.c_uint(1)  # cudaIpcMemLazyEnablePeerAccess


class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


class SharedBuffer:
    """
    Once it `is_mapped`, `buffer` is int32 [num_words] on this rank's GPU, and `addresses` says where each
    rank's begins in this process. `gather` gives every rank's value of an integer.

    Memory of a rank that has died stays valid for those who have mapped it.
    """

    def __init__(self, num_words: int, rank: int, device: torch.device, gather: Callable[[int], list[int]]):
        self._runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")  # torch has loaded it
        self._device = device
        self._own, handle = ctypes.c_void_p(), Handle()
        self._others: list[ctypes.c_void_p] = []
        self.addresses: list[int] = []
        self.is_mapped = False
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # creates the context, if nothing has yet
            own_status = self._call("Malloc", ctypes.byref(self._own), ctypes.c_size_t(4 * num_words))
            own_status = own_status or self._call("IpcGetMemHandle", ctypes.byref(handle), self._own)
            handles = gather(0 if own_status else int.from_bytes(bytes(handle), "little"))
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
        self.buffer = torch.as_tensor(_CudaArray(self._own.value, num_words), device=device)
        self.is_mapped = True

    def _call(self, name: str, *args: Any) -> int:
        """Call the runtime; anything but 0 is an error, which is then forgotten."""
        status = getattr(self._runtime, f"cuda{name}")(*args)
        if status:
            self._runtime.cudaGetLastError()
        return status

    def close(self) -> None:
        """
        Give the memory back. Nothing that uses it may be running on this rank, and the others must have
        ended: what they have mapped may not be freed.
        """
        with torch.cuda.device(self._device):
            for address in self._others:
                self._call("IpcCloseMemHandle", address)
            self._call("Free", self._own)
        self._others, self._own = [], ctypes.c_void_p()


class _CudaArray:
    """int32 [length] at an address, as the CUDA array interface describes it."""

    def __init__(self, address: int, length: int):
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (length,),
            "typestr": "<i4",
            "version": 3,
        }
