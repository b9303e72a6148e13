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


def troubled(samples):
    """even_sum, and at step 2 the trouble that the environment asks of a rank: `TROUBLE` and `TROUBLED_RANK`."""
    import os
    import signal
    import time

    trouble, mine = os.environ.get("TROUBLE"), os.environ.get("RANK", "0") == os.environ.get("TROUBLED_RANK", "1")
    if trouble == "sampling" and mine:
        from gspo.training import attention

        original = attention.sdpa_attention_forward

        def interrupted(*args, **kwargs):
            """In the middle of a layer of the next step's sampling."""
            os.kill(os.getpid(), signal.SIGTERM)
            return original(*args, **kwargs)

        attention.sdpa_attention_forward = interrupted
    if not any(s.id.startswith("s2/") for s in samples):
        return even_sum(samples)
    if trouble == "quit" and not mine:
        time.sleep(60)
    if not mine:
        return even_sum(samples)
    if trouble == "reward":
        raise RuntimeError("the verifier is down")
    if trouble == "quit":
        raise KeyboardInterrupt
    if trouble in ("SIGTERM", "SIGKILL"):
        os.kill(os.getpid(), getattr(signal, trouble))
    if trouble == "host":  # the launch agent, and then the rank
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    if trouble == "update":
        from gspo.training.optimizer import Optimizer
        from gspo.training.packing import TrainingError

        def step(self):
            raise TrainingError("the weights are broken")

        Optimizer.step = step
    return even_sum(samples)
