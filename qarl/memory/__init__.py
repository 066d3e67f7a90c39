"""Memory estimates, and the batch sizes derived from them. Imports no torch at module level."""
