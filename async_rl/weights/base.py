"""The one error of the weight path. Imports nothing, so that both sides of the wire may raise and catch it."""


class WeightsError(Exception):
    """A phase of a weight update failed; one sentence that names the phase, the membership and what to do."""
