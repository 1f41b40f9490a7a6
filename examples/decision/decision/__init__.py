"""An engine that answers questions with options: an example of an engine that depends on fuseboard's core alone."""
