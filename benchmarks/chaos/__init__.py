"""A whole run under a seeded schedule of faults; see `__main__`."""
