"""Weight sync: every policy version is quantized once, sent to the sampler, and verified there.

A publish goes one way: quantize.py -> snapshot.py -> sender.py -> transport.py -> update.py -> the engine.

quantize.py        master weights to stored tensors, without waiting for the GPU per tensor
snapshot.py        the tensors of one version, their sha256 for files, and the layout of the model
sender.py          the learner's side; canary.py compares what both sides compute
transport.py       a memory file or CUDA IPC
update.py          what is sent (all tensors, or the changed words), and how the sampler applies it
fingerprints.py    digests of tensors on their device, and their comparison
checkpoint.py      a snapshot as a directory that a sampler starts from
codes.py           all codes from those of each rank's rows; gathers.py: its messages
expert_tensors.py  the tensors of a layer's experts as a few large ones

Imports no engine and no policy: both import it.
"""
