"""Models made on the spot: the tiny policy, and SmolLM2 out of a PyPI package."""
