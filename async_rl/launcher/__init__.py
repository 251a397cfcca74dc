"""The process plan of one host: who runs where, who is watched, what an exit means. Never imports torch."""
