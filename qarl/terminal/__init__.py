"""The way to the terminal: standard output and error through which no text from outside drives it, and rich on them."""
