"""Structured outputs: completions that fit a JSON schema, a regular expression, a choice or a grammar.

A grammar says after every token which tokens may follow. That is a bitmask, one bit a token of the
vocabulary, and a token whose bit is 0 cannot be sampled. The bitmask depends on the token before it, so it
is made on the host between two steps, and only sampling waits for it: the step's forward pass runs meanwhile.

- `grammar.py` compiles what a request asks for, by llguidance, and keeps compiled grammars.
- `matchers.py` follows one text through a grammar.
- `bitmask.py`, the logits processor, and `kernels/token_masks.py` bring the bitmasks to the logits.
"""
