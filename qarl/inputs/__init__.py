"""What qarl did not just write itself, read with suspicion: paths, files, JSON and its schema. Imports no torch.

Each fault is one line that names the place. `paths` makes a path of what a user typed; `files` reads bytes and text
with a limit; `json` parses with limits on depth, numbers and text; `schema` checks types and required keys; `code`
imports what a user wrote, and `sources` makes digests of its files.
"""
