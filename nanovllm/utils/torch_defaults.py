"""The dtype and device that torch gives to new tensors, set while a model is made."""

import contextlib
import threading
from collections.abc import Iterator

import torch

dtype_lock = threading.RLock()  # torch has one default dtype for all threads


@contextlib.contextmanager
def torch_defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    with dtype_lock:
        earlier = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                yield
        finally:
            torch.set_default_dtype(earlier)
