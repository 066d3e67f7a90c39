"""Weight sync: every policy version is quantized once, sent to the sampler, and proved to have arrived.

A publish goes one way: snapshot.py -> sender.py -> transport.py -> receiver.py -> the engine.

snapshot.py      the tensors of one version, and their sha256 for files
sender.py        the learner's side; canary.py compares what both sides compute
update.py        what is sent: all tensors, or the changed words (delta)
transport.py     a memory file or CUDA IPC; payload.py is the description that a receiver gets
receiver.py      the sampler's side: patches applied, bytes verified
connection.py    the interface of a started sampler
checkpoint.py    a snapshot as a directory that a sampler starts from
fingerprints.py  digests of tensors on their device; verify.py compares them
shards.py        the parts of a model on several GPUs
layout.py        what an engine must know of the model

Imports no engine and no policy: both import it.
"""
