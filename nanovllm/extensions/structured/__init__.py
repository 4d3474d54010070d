"""Structured outputs: completions that fit a JSON schema, a regular expression, a choice or a grammar.

A grammar says after every token which tokens may follow. That is a bitmask, one bit a token of the
vocabulary, and a token whose bit is 0 cannot be sampled. The bitmask depends on the token before it, so it
is made on the host between two steps, and only sampling waits for it: the step's forward pass runs meanwhile.

- `params.py` is what a request says, and `json_schema.py` closes the objects of its schema.
- `grammar.py` compiles that, by llguidance, and keeps compiled grammars.
- `matchers.py` follows texts through a grammar.
- `bitmask.py`, the logits processor, makes the bitmasks and brings them to the device;
  `kernels/token_masks.py` applies them to the logits.
"""
