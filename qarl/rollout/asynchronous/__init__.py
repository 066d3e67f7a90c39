"""Asynchronous rollouts: a native engine or vLLM in its own process samples while the learner learns.

host.py         the sampler's process with the native engine, started by `rollout/child.py`
vllm_host.py    vLLM in place of the native engine
process.py      the learner's handle of that process
connection.py   the thread that sends orders, receives responses and restarts a failed process
groups.py       prompts in flight, their responses and scores
group_queue.py  these groups, shared between the learner and its threads
saved_groups.py these groups in a checkpoint
engine.py       the engine of the training loop: publish, take, save, restart
"""
