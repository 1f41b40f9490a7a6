"""For engine authors: what goes around attention. Imports nothing, so that `cpu` can run before torch is imported."""
