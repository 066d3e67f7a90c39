"""What is measured at every step beside the reward: pure functions of log-probs, never part of the gradient."""
