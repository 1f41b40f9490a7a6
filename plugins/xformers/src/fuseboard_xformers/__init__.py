"""xFormers' memory-efficient attention as a fuseboard backend.

`xformers` is the spec sheet and the kernel; `_package` imports the package and says why it cannot be used, `_biases`
says a structure in its words, `_tensors` lays inputs out.
"""
