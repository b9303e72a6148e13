"""Environments that tests name in recipes."""

from gspo.types import Reply


class Sums:
    """Asks `turns` times for a digit; only turn `scored` has a reward, 1 for an even digit."""

    def __init__(self, columns, turns=3, scored=1):
        self.turns, self.scored, self.number = turns, scored, 0

    def step(self, messages):
        said = messages[-1]["content"]
        reward = float(said[:1] in tuple("02468")) if self.number == self.scored else None
        self.number += 1
        done = self.number == self.turns
        return Reply(() if done else ({"role": "user", "content": "+1="},), done=done, reward=reward)


class Broken:
    """Fails as it is told."""

    def __init__(self, columns, reply="raise"):
        self.reply = reply

    def step(self, messages):
        if self.reply == "raise":
            raise RuntimeError("the game has crashed")
        return {"none": None, "nan": Reply(done=True, reward=float("nan")), "silent": Reply(),
                "message": Reply(({"role": "user"},))}[self.reply]  # fmt: skip
