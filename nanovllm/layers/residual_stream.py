"""The residual stream between two layers, and how far the norm behind it has been computed.

RMSNorm needs whole rows, and who multiplies next knows best when to normalise them: a product of a few rows
does it itself, a product of some hundred rows leaves half of it to the next, the library's wants it done.
Models pass a `Stream` on and never ask.
"""

from typing import NamedTuple

from torch import Tensor

from nanovllm.layers.layernorm import RMSNorm


class Stream(NamedTuple):
    """
    `x` in front of `norm`. Without `scaled` nothing of the norm is computed yet. `scaled` alone is norm(x);
    with `squares` it is x * norm.weight, still to be divided by the root mean square of x's rows.
    """

    x: Tensor  # [tokens, hidden]; with several ranks only the share that this one has to add to
    norm: RMSNorm
    scaled: Tensor | None = None  # [tokens, hidden]
    squares: Tensor | None = None  # float32 [tokens, parts]: their sums are those of the squares of x's rows

    def normalised(self) -> Tensor:
        """norm(x), [tokens, hidden]."""
        return self.norm(self.x) if self.scaled is None or self.squares is not None else self.scaled
