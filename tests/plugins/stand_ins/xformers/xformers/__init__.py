"""Stands in for xFormers on a CPU: what the plugin reads of it, with its signatures and its faults, in torch."""

_has_cpp_library = True
