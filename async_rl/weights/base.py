"""The one error of the weight path. Imports nothing, so that both sides of the wire may raise and catch it."""


class WeightsError(Exception):
    """A phase of a weight update failed; one sentence that names the phase, the membership and what to do. `absent`: the ranks
    that never came to the group, where rank 0 knows them."""

    def __init__(self, sentence: str, absent: tuple[int, ...] = ()) -> None:
        super().__init__(sentence)
        self.absent = absent
