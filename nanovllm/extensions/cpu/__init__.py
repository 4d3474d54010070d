"""A decode step on a CPU as one compiled function over packed weights.

A step of a small model is a thousand small operations: 30 layers of 15. Called one by one from Python, each
costs more than it computes: SmolLM2-135M in 4 bits took 20 ms a token, of which 4 were products of codes. In
one function that Numba compiles (`pip install nano-vllm[cpu]`; no compiler is needed) they take 5 ms in all.

- *The instruction.* CPUs with AVX-512 VNNI multiply four unsigned bytes by four signed ones and add up, in
  each of 16 lanes. Unsigned are the weights' codes, of four neighbouring inputs of one output; signed the
  activations. `packing` brings the weights into the order in which this reads them, and `vectors` gives Numba
  the instruction. Without it plain vectors compute the same; compiled for AVX2 they were 1.4 times as
  fast as torch's AVX-512 for a row and slower for 8, so more rows than one keep the torch path.
- *The sums.* With a scale s and a zero z for 32 weights, and a scale t for 32 activations, a group adds
  t * (s * (sum of w * x - middle * sum of x) + z * sum of x). Where a scale is for 16 weights, there are two
  such sums, without zeros. Activations have two digits of a byte, so that they lose less than in bfloat16: KL
  0.0006 to float32, and 0.0010 on the torch path. One digit gave 0.0039 and was no faster for one row, which
  waits for the weights.
- *The threads* are torch's, once for a whole step, with six barriers a layer in `compiled`.

It takes decode steps of 1 to 8 sequences of dense models like Llama, Qwen2 and Qwen3 from GGUF files of any
quantised type but Q2_K (which has zeros for 16 weights), also of several, as Q4_K_M has them, in bfloat16 and
on one rank, where torch packs codes as for AVX-512. The LM head is multiplied in 8 bits. All
else keeps the torch path: prompts, more rows, other models, windows, an 8-bit KV cache, `exact=True`, and
everything with `enforce_eager=True`. As in CUDA graphs, hooks of torch are not called in compiled steps.

Beside the weights of the torch path, which prompts need, there are the packed ones: 98 MB for SmolLM2, 5 bits
a weight of 4 and 9 of 8. Packing takes about half a second. Compiling takes 10 seconds in the first decode
step ever: the code is kept in the user's cache, `~/.cache/nano-vllm/numba-...`, and then loads in one.
"""
