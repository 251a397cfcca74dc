"""The learner and its rollouts: who is connected, what is leased, what comes back, and how weights go out. On rank 0."""
