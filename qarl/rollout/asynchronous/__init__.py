"""Asynchronous rollouts: a native engine in a process of its own samples while the learner learns.

host.py      the sampler's process: generation, publishes and messages
child.py     its entry point
process.py   the learner's handle of the process
groups.py    prompts in flight, their responses and scores, and what a checkpoint keeps of them
engine.py    what the training loop uses: publish, take, save, restart
"""
