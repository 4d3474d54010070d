"""Products whose bits do not depend on the number of rows."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.extensions.exact.kernels.ordered_sum import sum_in_order
from nanovllm.extensions.exact.kernels.product import few_rows, multiply, product
from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.runtime import has_hopper_shared_memory, is_on_gpu, use_triton
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import DenseWeight, Product, activated

ONE_THREAD = 32_768  # elements


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] @ weight.T + bias: [rows, out], for weight [out, in]; each row as if it were alone."""
    if is_on_gpu(weight):
        return product(x, weight, bias)
    # oneDNN has one order of addition for two rows and more, and another one for a single row.
    inputs = F.pad(x, (0, 0, 0, 1)) if len(x) == 1 else x, weight, bias
    if x.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        inputs = (each if each is None else each.float() for each in inputs)
    return torch.ops.mkldnn._linear_pointwise.default(*inputs, "none", [], "")[: len(x)].to(x.dtype)


def exact_silu_and_mul(x: Tensor) -> Tensor:
    """`silu_and_mul` of x [rows, 2 * width]."""
    if is_on_gpu(x):
        return silu_and_mul(x)
    # torch computes exponentials by other code at the borders between threads. So few it leaves to one.
    return torch.cat([silu_and_mul(rows) for rows in x.split(max(1, ONE_THREAD // x.shape[1]))])


def exact_mixture(moe: Any, x: Tensor, weights: Any, chosen: Any, is_prefill: bool) -> Tensor:
    """
    The sum of what the `chosen` experts make of each row of x [rows, hidden], in its shape. The module `moe`
    multiplies any number of rows as a prefill does: grouped products take inputs in ascending order. Outputs
    are added up in the order in which the router names the experts, and rounded once. A CPU takes so few rows
    at a time that one thread computes their activation, see `exact_silu_and_mul`.
    """
    weights = weights._replace(linear=exact_linear)
    kernels = moe.choose_kernels(x, weights, is_prefill=True)

    def add_up(x: Tensor, *its: Tensor) -> Tensor:
        return sum_in_order(moe.run_grouped(kernels, x, weights, chosen._make(its), is_prefill))

    if kernels is not None:
        return add_up(x, *chosen)
    most = max(1, ONE_THREAD // (2 * weights.width))
    return torch.cat([*map(add_up, *(each.split(most) for each in (x, *chosen)))])


@dataclass
class FewRows(Product):
    """For few rows of a decode step, with the activation folded in."""

    weight: Tensor

    def accepts(self, rows: int, is_prefill: bool) -> bool:
        return not is_prefill and few_rows(rows, self.weight)

    def linear(self, x: Tensor, bias: Tensor | None, gated: bool = False) -> Tensor:
        return multiply(activated(x), self.weight, bias, gated)


def few_rows_products(weight: Tensor) -> list[Product]:
    """FewRows where it is the faster way for few rows. It needs Hopper's shared memory."""
    is_half = is_on_gpu(weight) and use_triton(weight) and weight.element_size() == 2
    return [FewRows(weight)] if is_half and has_hopper_shared_memory(weight.device) else []


class ExactWeight(DenseWeight):
    act_fn = staticmethod(exact_silu_and_mul)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return exact_linear(x, self.weight, bias)

    def products(self, layer: nn.Module) -> list[Product]:
        return few_rows_products(self.weight)


@functools.cache
def dense_weight(is_exact: bool, usual: type[DenseWeight]) -> type[DenseWeight]:
    """ExactWeight, or the usual class, whose weights then list FewRows behind the products that they have."""
    if is_exact:
        return ExactWeight

    class WithFewRows(usual):
        def products(self, layer: nn.Module) -> list[Product]:
            return super().products(layer) + few_rows_products(self.weight)

    return WithFewRows


class ExactHead(ParallelLMHead):
    multiply = staticmethod(exact_linear)

    def logits(self, hidden_states: Tensor) -> Tensor:
        return self.multiply(hidden_states, self.weight[: self.vocab_end - self.vocab_start])


class FewRowsHead(ExactHead):
    multiply = staticmethod(functools.partial(product, is_exact=False))


def use_heads(model: nn.Module, are_exact: bool) -> None:
    """The LM heads of a model become exact ones, or on a GPU such as multiply few rows faster."""
    for head in model.modules():
        if type(head) is ParallelLMHead and (are_exact or few_rows_products(head.weight)):
            head.__class__ = ExactHead if are_exact else FewRowsHead
