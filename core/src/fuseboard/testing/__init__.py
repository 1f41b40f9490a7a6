"""For kernel authors: the conformance kit (`pytest --fuseboard-backend NAME`), and doubles for tests.

Loads no torch by itself.
"""
