"""What `verifiers.load_environment("verifiers-for-tests")` finds, where the package is installed."""

import verifiers as vf
from datasets import Dataset

ROWS = [
    {"prompt": [{"role": "user", "content": f"{n}?"}], "answer": str(n), "info": {"number": n}, "task": "guess"}
    for n in (1, 2, 3)
]


class Guess(vf.MultiTurnEnv):
    """Told higher or lower; the reward is 1 over the number of guesses, from a state of the environment's own."""

    words = ("lower", "higher")

    async def setup_state(self, state):
        state["guesses"] = []
        return state

    @vf.stop
    async def guessed(self, state):
        trajectory = state["trajectory"]
        return bool(trajectory) and trajectory[-1]["completion"][-1]["content"].strip() == state["answer"]

    async def env_response(self, messages, state, **kwargs):
        said = messages[-1]["content"].strip()
        state["guesses"].append(said)
        if said == "stop":
            state["final_env_response"] = [{"role": "user", "content": "bye"}]
            return state["final_env_response"]
        if said == "crash":
            raise vf.Error("the game has crashed")
        return [{"role": "user", "content": self.words[said < state["answer"]]}]


class Signs(Guess):
    words = ("-1=", "+1=")


class Rewriting(Guess):
    async def get_prompt_messages(self, state):
        return (await super().get_prompt_messages(state))[-1:]


def found(completion, answer, state):
    return float(completion[-1]["content"].strip() == answer) / (1 + len(state["guesses"]))


async def polite(parser, completion, **kwargs):
    return 0.25 * (kwargs["info"]["number"] > 0) * len([m for m in completion if m["role"] == "assistant"])


def double(x: int) -> int:
    """Twice a number.

    Args:
        x: The number.
    """
    if x > 100:
        raise ValueError("too large")
    return 2 * x


def doubled(completion, answer):
    return float(completion[-1]["content"] == str(2 * int(answer)))


def load_environment(kind="guess", max_turns=5):
    data = Dataset.from_list(ROWS)
    if kind == "tools":
        return vf.ToolEnv([double], max_turns=max_turns, dataset=data, rubric=vf.Rubric([doubled]))
    if kind == "single":
        return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric([doubled]))
    made = {"guess": Guess, "signs": Signs, "rewriting": Rewriting}[kind]
    return made(max_turns=max_turns, dataset=data, rubric=vf.Rubric([found, polite], [1.0, 0.5]))
