"""From a batch that every rank holds to an updated policy: models, passes, losses, optimizers. Collective on all ranks."""
