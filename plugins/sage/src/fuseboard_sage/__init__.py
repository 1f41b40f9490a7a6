"""SageAttention as fuseboard backends: quantised scores, so approximate, and without a backward.

`sage` is the distribution `sageattention`, whose two generations share a name and little else: `_one` and `_two` hold
what each takes. `sage3` is the distribution `sageattn3`. `_tensors` and `_limits` hold what they share.
"""
