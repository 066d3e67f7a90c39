"""From the learner to a sampler: each policy version, quantized once, carried over and proved to have arrived.

snapshot.py      the tensors of one version; sha256 of them for files
layout.py        what an engine must know of the model that snapshots are of
fingerprints.py  digests of tensors where they are
verify.py        the comparison of what a holder shows with what was published
plan.py          what an update sends: everything, or (delta.py) the changed words
update.py        an update as an order to a sampler
sender.py        the learner's side: what the sampler holds, sending, the canary (canary.py)
receiver.py      the sampler's side
link.py          a started sampler, as orders reach it
checkpoint.py    a snapshot as a directory that a sampler starts from
carriers.py gpu_carriers.py parcels.py transport.py   a memory file, or CUDA IPC

Knows no engine and no policy: both import it.
"""
