"""Looking at a finished step again: its rollouts under its checkpoint's weights, the numbers, and what they say."""
