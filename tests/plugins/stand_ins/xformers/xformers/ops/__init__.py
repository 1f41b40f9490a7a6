"""Imports the attention, as the package does."""

from . import fmha as fmha
