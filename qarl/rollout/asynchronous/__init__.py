"""Asynchronous rollouts: a native engine or vLLM in a process of its own samples while the learner learns.

host.py      the sampler's process (started by `rollout/child.py`): generation, publishes and messages
vllm_host.py vLLM in place of the native engine
process.py   the learner's handle of the process
groups.py    prompts in flight, their responses and scores, and what a checkpoint keeps of them
engine.py    what the training loop uses: publish, take, save, restart
"""
