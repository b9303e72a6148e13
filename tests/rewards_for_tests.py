"""Reward functions that tests name by file."""


def even_sum(samples):
    """1 where the token ids of the response add up to an even number: mixed within most groups, whatever the model."""
    return [float(s.completion.token_ids.sum() % 2 == 0) for s in samples]


def broken(samples):
    raise RuntimeError("the verifier is down")


def stops(samples):
    """A signal that arrives while the reward works, and a reward that takes every Exception for its own."""
    import os
    import signal

    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except Exception:
        return [0.0] * len(samples)
    return [0.0] * len(samples)
