"""Readers of task sources; each turns its source into `Item`s."""
