"""What requests change about logits before a token is sampled, and what they ask about them.

A request may bias or ban tokens, penalise those it has used, or keep only the likeliest (top-k, top-p,
min-p); and it may ask how likely tokens were (log-probabilities, scores of its prompt). All of it happens on
the device, inside the step's CUDA graph, and a batch in which nobody asks for anything pays nothing.

Each file is one `LogitsProcessor`, a host half and a device half that share nothing but messages. The host
half turns parameters into numbers when a request is read or prefilled; the device half keeps them by slot.

- `bias.py`: biases, banned tokens and words, and ends that come too early. Requests wait whose biases and
  bans do not fit into a device's memory together (extensions/safety/admission.py).
- `penalties.py`: penalties for tokens that were used, and the only tokens that are allowed.
- `filters.py`: top-k, top-p and min-p as one threshold a row, found by a search that never sorts.
- `logprobs.py`: how likely each token of a completion was, to the model or in the draw.
- `scores.py`: how likely the tokens of a prompt are, computed from a prefill's hidden states.
- `processors.py`: all of them.
- `slot_settings.py`: a table of numbers by slot, neutral for those who want none.
- `kernels/`: biases, bans and penalties in one pass that touches only the rows that ask; filters;
  log-probabilities, in whose sums the number of rows changes no bit.
"""
