"""The attention kernels inside PyTorch, each pinned by its own aten operator, as fuseboard backends.

One module is one backend, a spec sheet read from top to bottom; `_tensors` holds what they share.
"""
