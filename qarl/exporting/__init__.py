"""Low-bit checkpoints for serving: the tensors of a run, bit for bit, as compressed-tensors files with a model card.

staging.py    a directory that appears whole or not at all
writer.py     parameters streamed one at a time into those files, proved, with everything a loader needs beside them
card.py       README.md: what it is, how it was trained, how to load it
training.py   what the card says of the run
job.py        from a target to an exported directory
"""
