"""One run on several GPUs: ranks and what they say to one another, rows of the masters, and the codes of all rows."""
