"""Weight sync: every policy version is quantized once, sent to the sampler, and verified there.

A publish goes one way: codes.py -> snapshot.py -> sender.py -> transport.py -> update.py -> the engine.

codes.py           all master weights to stored tensors, on one rank or several; gathers.py: its messages
quantize.py        single master weights, and the check that they are finite
snapshot.py        the tensors of one version, their sha256 for files, and the layout of the model
sender.py          the learner's side; canary.py compares what both sides compute
transport.py       a memory file or CUDA IPC
update.py          what is sent (all tensors, or the changed words), and how the sampler applies it
fingerprints.py    digests of tensors on their device, and their comparison
checkpoint.py      a snapshot as a directory that a sampler starts from
expert_tensors.py  the tensors of a layer's experts as a few large ones

Imports no engine and no policy: both import it.
"""
