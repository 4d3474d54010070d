"""What a linear layer knows of its weight, whatever the format."""

from typing import Any

from torch import Tensor, nn

from nanovllm.kernels.fp8_linear import QuantisedRows, Unscaled
from nanovllm.utils.loader import StoredTensor


class WeightFormat:
    """A weight [out, in]: `parameters` are its tensors, `stored` what a checkpoint has in their place."""

    shape: tuple[int, int]
    parameters: dict[str, Tensor | nn.Parameter]
    stored: dict[str, StoredTensor]

    def multiply(
        self, x: Tensor | QuantisedRows, bias: Tensor | None, leave_scales: bool = False
    ) -> Tensor | Unscaled:
        """
        x [tokens, in] @ weight.T + bias: [tokens, out]. With leave_scales the product of a quantised x may be
        left without its scales.
        """
        raise NotImplementedError

    def can_use_matvec(self, x: Tensor) -> bool:
        """Whether `matvec` works for rows like x, and is the fastest way to multiply."""
        return False

    def matvec(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """The product of a few rows with its neighbours, as `kernels.matvec.linear_small`."""
        raise NotImplementedError

    def activation_group(self, x: Tensor) -> int | None:
        """
        None if rows like x are multiplied as they are. Otherwise they are to be quantised, with a scale for
        so many inputs; 0 is one for a row.
        """
        return None

    def fill(self, matrix: Tensor) -> None:
        """Make the weight of a random matrix [out, in], where a format has other tensors than `weight`."""
        raise NotImplementedError

    def finish(self) -> None:
        """Called when all tensors are loaded."""

    def pack(self) -> None:
        """Called after `finish`: bring the weight into the layout that multiplies fastest here."""
