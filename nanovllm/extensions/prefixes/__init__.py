"""Prompts that begin alike: their common prefix is stored once, computed once and read once.

The core shares whole blocks: two prompts whose first 256 tokens are equal use the same block. This extension
goes further in three steps.

- *Stored to the token.* Two prompts that part ways inside a block have the equal part copied from one block
  to the other. `token_prefixes.py` finds the block with the longest common prefix by a binary search, and has
  its tokens copied (a `PrefixCache`).
- *Computed once.* A prompt that could reuse what another one computes in this very step is held back for one
  step and then copies it (`HoldBack`, an `Admission`).
- *Read once.* In a decode step all sequences that share a prefix read its keys and values together: their
  queries stand below one another in one tile (`kernels/shared_prefix.py`), and what each sequence has of its
  own is added by log-sum-exp. `planner.py` plans on rank 0 who reads what together, and `cascade.py`
  is the attention back-end that follows the plan. Known as cascade attention, Hydragen and DeFT.
"""
