"""Exactness: the bits of a sequence do not depend on its company.

Floating-point addition is not associative. An engine adds the same numbers in another order when a sequence
has other neighbours: products split their sums to fill the chip, attention splits a context, kernels for one
row sum over lanes. So the same question gets another answer in a larger batch, and a trainer that computes
the log-probabilities of what an engine has generated gets other numbers.

The remedy is one order of addition for every batch size:

- *Products* add over the inputs in ascending order into one float32 and round once. On Hopper every product
  that does not split this sum has these bits, the library's too, whatever its tiles are. So nothing is
  rewritten: `products` chooses, by the shape and the number of rows, among products that were found to have
  these bits on this card.
- *Attention* adds over tiles of 128 keys, from a multiple of 128 on, which are folded in order. Prefill,
  decode and shared prefixes compute a tile by the same function, and whoever splits a context splits it
  between tiles (`kernels.attention`).
- *Everything else* already belongs to one row: norms, activations, rotations, sampling.

`trainer` gives a transformers model the same functions, and `check` compares both.
"""
