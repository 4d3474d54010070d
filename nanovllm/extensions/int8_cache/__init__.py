"""A KV cache of 8 bits a number: nearly twice the tokens in the same memory, half the bytes of a decode step.

At large batches a decode step takes as long as it takes to read the KV cache. Each stored key and value
vector becomes bytes with a scale of its own, made when it is stored: there is nothing to calibrate, and no
value is too large. A few channels of K are much larger than the others and would waste the range, so q and K
are rotated by a Hadamard matrix first. It spreads each channel over all of them and leaves every product
q . k what it was.

Read in this order:

- `layout.py`: all that the engine asks of such a cache, as a `CacheLayout` of the core.
- `kernels/int8_cache.py`: how a page is laid out, how vectors become bytes, and how they are read again.
- `kernels/store.py`: the bytes are made in the kernel that rotates and stores; these are its hooks.
- `kernels/decode.py`: a decode kernel of its own. A prefill converts the bytes to the model's dtype when it
  reads a tile (`load_dequantised`), but a decode step waits for memory and for instructions alike, so here
  bytes are multiplied almost as they are. That changes the query, the scores, the weights and their maximum.
"""
