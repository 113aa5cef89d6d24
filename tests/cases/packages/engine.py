"""What weighs the losses, one module away from the script."""

import stats


class Engine:
    def __init__(self):
        self.helper = Helper()

    def weight(self):
        return self.helper.weight()


class Helper:
    def weight(self):
        return 1 + 0.01 * stats.add("train")
