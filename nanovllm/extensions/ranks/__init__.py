"""Sums over the ranks without a library call: GPUs write into each other's memory.

With tensor parallelism every layer adds up the ranks' results twice. At decode sizes such a sum is a few
kilobytes, so its time is latency. Here each rank writes its part straight into the others' receive buffers;
the data themselves say when they have arrived, so there is no barrier and no flag, and the RMSNorm behind the
sum is part of the same kernel.

- `kernels/all_reduce.py`: the sum, the sum with the norm, and the choice of the best token.
- `peer_group.py`: the group of ranks that computes so, or as the core does where a GPU cannot.
- `cuda_ipc.py`: how ranks map each other's memory.

And `reports.py` says which rank has failed and why, where the core knows only that one has ended.
"""
