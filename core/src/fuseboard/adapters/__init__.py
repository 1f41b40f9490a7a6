"""Other people's models on the board; one module for each library, imported by whoever wants it."""
