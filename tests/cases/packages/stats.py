"""What is counted, two modules away from the script."""

import random

seen = 0
by_name = {}
draws = random.Random(3)


class Counted:
    def __init__(self):
        self.count = 0

    def add(self):
        global seen
        self.count += 1
        seen += 1


trackers = {"loss": Counted()}


def add(name):
    trackers["loss"].add()
    by_name[name] = by_name.get(name, 0) + 1
    return seen + draws.random()
