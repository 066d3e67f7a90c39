"""From the learner to the sampler: snapshots of quantized tensors, their manifest, and proof of arrival."""
