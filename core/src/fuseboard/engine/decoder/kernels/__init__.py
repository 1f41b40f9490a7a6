"""Triton kernels of one-token steps: `exact` has torch's bits and is on by itself; `glue` has not, and is asked for."""
