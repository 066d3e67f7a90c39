"""Export a run's tensors, bit for bit, as a compressed-tensors checkpoint with a model card.

job.py        from a target to an exported directory
writer.py     writes parameters one at a time, and reads them back
staging.py    an output directory that appears complete or not at all
card.py       README.md; training.py has its section about the run
verify.py     compares an export with the run in several readers; readers.py runs them
"""
