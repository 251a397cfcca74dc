"""A rollout process: one engine, leases in, scored groups out."""
