"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168) as a prompt source: word problems with a whole number as their answer."""

from collections.abc import Iterator


def problems(split: str) -> Iterator[dict[str, str]]:
    """Rows with `question`, the worked `solution`, and `answer`, the number after its `####`, without commas.

    split: "train" or "test". Needs the hub, or the data set in the cache of `datasets`.
    """
    from datasets import load_dataset

    for row in load_dataset("openai/gsm8k", "main", split=split):
        solution, _, number = row["answer"].rpartition("####")
        yield {"question": row["question"], "solution": solution.strip(), "answer": number.strip().replace(",", "")}
