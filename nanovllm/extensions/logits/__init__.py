"""What requests change about logits before a token is sampled, and what they ask about them.

A request may bias or ban tokens, penalise those it has used, or keep only the likeliest (top-k, top-p,
min-p); and it may ask how likely tokens were (log-probabilities, scores of its prompt). All of it happens on
the device, inside the step's CUDA graph, and a batch in which nobody asks for anything pays nothing.

- `edits.py`: a request's parameters as numbers. The host keeps what was sent; the device keeps a row for
  each running sequence and applies it.
- `budget.py`: requests wait whose biases and bans do not fit into a device's memory together.
- `kernels/logit_edits.py`: biases, bans and penalties, in one pass that touches only the rows that ask.
- `kernels/filtering.py`: top-k, top-p and min-p as one threshold a row, found by a search that never sorts.
- `scoring.py`: which tokens of a prompt a prefill step scores.
"""
