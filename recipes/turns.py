"""Four additions in one episode, of which one turn is scored: rows, pairs to imitate, and the environment."""

import random

from gspo.types import Reply

TURNS = 4


def problems(seed, size):
    """Rows of four problems; the first is the prompt."""
    numbers = random.Random(seed)
    for _ in range(size):
        pairs = [(numbers.randrange(100), numbers.randrange(10)) for _ in range(TURNS)]
        yield {
            "prompt": f"{pairs[0][0]}+{pairs[0][1]}=",
            "problems": [f"{a}+{b}=" for a, b in pairs],
            "sums": [str(a + b) for a, b in pairs],
        }


def examples(seed, size):
    """Rows to imitate: a problem after none to three solved ones, with the token that ends a response written out."""
    numbers = random.Random(seed)
    for row in problems(seed, size):
        before = numbers.randrange(TURNS)
        solved = [f"{p}{s}<eos>" for p, s in zip(row["problems"][:before], row["sums"][:before], strict=True)]
        yield {"prompt": "".join(solved) + row["problems"][before], "answer": row["sums"][before]}


class Additions:
    """Asks the four problems; one turn alone, counted from 0, is worth something."""

    def __init__(self, columns, scored=1):
        self.problems, self.sums, self.scored, self.turn = columns["problems"], columns["sums"], scored, 0

    def step(self, messages):
        right = float(messages[-1]["content"] == self.sums[self.turn])
        reward = right if self.turn == self.scored else None
        self.turn += 1
        if self.turn == len(self.problems):
            return Reply(done=True, reward=reward)
        return Reply(({"role": "user", "content": self.problems[self.turn]},), reward=reward)
