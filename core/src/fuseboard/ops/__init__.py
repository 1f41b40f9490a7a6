"""For operators: what works here, what a call would use, and what an engine does to the process."""
