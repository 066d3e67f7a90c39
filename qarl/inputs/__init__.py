"""Validated reading of untrusted input: paths, files, JSON and its schema. Imports no torch.

Each error is one line that names the source.

arguments         types of the arguments of Python functions
code, sources     import of user code, and digests of its files
files             bytes and text, with a size limit
json, schema      JSON with limits on depth, numbers and text; types and required keys
library_errors    exceptions of libraries that read files
paths             paths that a user typed
section, limits   base class of configuration sections, and bounds of their values
tensors           headers and values of safetensors files
"""
