"""The operations that decide the engine's speed, one subject a file.

Every file holds a Triton kernel for CUDA, a plain torch reference (`*_torch`), which is its specification and
what CPUs run, and a public function that picks one of them. The kernels know nothing of models or scheduling:
tensors in, tensors out. They never wait for the GPU, and their grids depend on shapes alone, so that CUDA
graphs can hold them. In Triton functions, names in capitals are constants that the compiler knows.
"""
