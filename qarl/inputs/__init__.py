"""Validated reading of untrusted input: paths, files, JSON and its schema. Imports no torch.

Each error is one line that names the source. `paths` validates paths that a user typed; `files` reads bytes and text
with a size limit; `json` parses with limits on depth, numbers and text; `schema` checks types and required keys; `code`
imports user code, and `sources` computes digests of its files; `section` is the base class of configuration sections,
`limits` their bounds.
"""
