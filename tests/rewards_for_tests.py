"""Reward functions that tests name by file."""


def even_sum(samples):
    """1 where the token ids of the response add up to an even number: mixed within most groups, whatever the model."""
    return [float(s.completion.token_ids.sum() % 2 == 0) for s in samples]


def broken(samples):
    raise RuntimeError("the verifier is down")
