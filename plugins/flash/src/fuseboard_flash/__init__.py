"""FlashAttention 2, 3 and 4 as fuseboard backends, each from its own optional package.

One module is one backend, a spec sheet read from top to bottom; `_layout` holds what they share.
"""
