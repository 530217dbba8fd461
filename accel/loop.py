"""Which run of a pipeline's denoising loop this is."""


class Loop:
    """`number` counts the loops a pipeline has begun; 0 where no pipeline was given to `optimize`, only a model.

    What lives for one loop, such as features kept from step to step, compares it with the number it saw last.
    """

    def __init__(self):
        self.number = 0

    def begin(self) -> None:
        self.number += 1
