"""The documents say what is so: generated ones are fresh, commands and quotes are right, links and names lead somewhere."""

import importlib.util
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_house import FLOORS

from gspo import cli
from gspo.recipe import build, known_keys, load, parse_overrides
from gspo.reporting.names import METRICS
from gspo.rewards import build as build_rewards
from gspo.rewards import score
from gspo.types import Completion, Prompt, Sample

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "evidence").glob("*.md")])
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]

each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)


def blocks(text: str, language: str) -> list[str]:
    """Fenced blocks of a language, "" for those without one."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for name, block in fenced if name == language]


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command: lines of bash blocks and of indented ones, and `gspo ...` inside a sentence."""
    lines = [line for block in blocks(text, "bash") for line in block.splitlines()]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines += re.findall(r"^    (\S.*)$", prose, re.MULTILINE) + re.findall(r"`((?:gspo|python) [^`]+)`", prose)
    for line in lines:
        words = shlex.split(line, comments=True)
        while "&&" in words:
            yield words[: words.index("&&")]
            words = words[words.index("&&") + 1 :]
        if words:
            yield words


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    heads = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def listed(tree: str) -> set[str]:
    """The Python files of an indented tree, by their paths."""
    folders: list[str] = []
    files = set()
    for line in tree.splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        folders[depth:] = [name]
        if name.endswith(".py"):
            files.add("".join(folders))
    return files


# ---- generated --------------------------------------------------------------------------------------------


def test_generated_documents_are_fresh():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for path, make in generate.DOCUMENTS.items():
        assert path.read_text("utf-8") == make(), f"{path.name} is stale: run python docs/generate.py"


def test_every_setting_and_every_metric_is_documented():
    recipes, metrics = ((ROOT / "docs" / name).read_text("utf-8") for name in ("recipes.md", "metrics.md"))
    keys = [k for k in known_keys() if not k.startswith(("cold_start.data.", "evaluation.data."))]
    assert not [k for k in keys if f"`{k}`" not in recipes and f"[{k}]`" not in recipes and f"[[{k}]]`" not in recipes]
    assert not [key for key in METRICS if f"`{key}`" not in metrics]


# ---- commands and code ------------------------------------------------------------------------------------


@each_document
def test_every_command_names_what_exists(path):
    for words in commands(path.read_text("utf-8")):
        files = [word for word in words if word.endswith((".toml", ".py")) and "path/to/" not in word]
        assert not [f for f in files if not (ROOT / f).is_file()], words
        extras = re.findall(r"\.\[([\w,]+)\]", " ".join(words))
        assert not [e for found in extras for e in found.split(",") if e not in EXTRAS], words
        if words[0] == "gspo" and "--help" not in words:
            assert words[1] in ("train", "sft", "eval", "compare-evals", "check", "report", "compare", "watch"), words
        if words[0] == "gspo" and len(words) > 2:  # two words name the command, and do not call it
            options, overrides = cli._parser().parse_known_args(words[1:])
            if getattr(options, "suites", None):
                cli._suite_parser().parse_args(overrides)
            elif overrides:
                parse_overrides(overrides)
                if words[2].endswith(".toml"):
                    load(ROOT / words[2], overrides)


def test_the_readme_has_the_two_commands_that_matter():
    assert "    pip install -e . && gspo train recipes/quickstart.toml\n" in README
    assert "    pip install -e '.[test]' && pytest\n" in README


def test_the_loop_in_the_readme_is_the_loop():
    (quoted,) = (block for block in blocks(README, "python") if "while run.step" in block)
    loop = (ROOT / "gspo" / "loop.py").read_text("utf-8")
    whole = re.search(r"^        while .*\n(?:            .*\n)+", loop, re.MULTILINE)
    assert whole is not None and quoted == textwrap.dedent(whole[0])


def test_the_reward_in_the_readme_is_a_reward_of_six_lines(tmp_path, monkeypatch):
    (code,) = (block for block in blocks(README, "python") if "def same_word" in block)
    (table,) = blocks(README, "toml")
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 6
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(code)
    values = load(ROOT / "recipes" / "quickstart.toml").model_dump()
    config = build(values | tomllib.loads(table))
    prompt = Prompt(0, None, "say yes", (1,), "Yes")
    completion = Completion(torch.tensor([1]).numpy(), torch.zeros(1).numpy(), "stop", 0, 0)
    samples = [Sample(f"s1/e0-r0/{i}", prompt, completion, text) for i, text in enumerate((" yes\n", "no"))]
    assert [scored.total for scored in score(build_rewards(config.rewards), samples)] == [1.0, 0.0]


def test_the_padded_example_in_the_readme_runs(capsys):
    (code,) = (block for block in blocks(README, "python") if "policy_loss" in block)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 5
    logp = torch.full((2, 3), -1.0, requires_grad=True)
    given = {"old_logp": torch.full((2, 3), -1.0), "mask": torch.ones(2, 3).bool(), "advantage": torch.tensor([1.0, -1.0])}
    exec(code, {"logp": logp, **given})
    assert logp.grad is not None and logp.grad[0].sum() == pytest.approx(-0.5)
    assert "tensor([1., 1.])" in capsys.readouterr().out


def test_the_gsm8k_source_takes_the_number_behind_the_marks(monkeypatch):
    import datasets

    from gspo.data import load_rows

    row = {"question": "Two and two thousand?", "answer": "2 + 2000 = <<2+2000=2002>>2002\n#### 2,002"}
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name, split: [row])
    monkeypatch.chdir(ROOT)
    config = load(ROOT / "recipes" / "gsm8k-lora.toml")
    rewards = build_rewards(config.rewards)
    (columns,) = load_rows(config.data)
    assert (columns["question"], columns["answer"]) == (row["question"], "2002")
    prompt = Prompt(0, None, "", (1,), columns["answer"], columns)
    completion = Completion(torch.tensor([1]).numpy(), torch.zeros(1).numpy(), "stop", 0, 0)
    texts = ("It is\n\\boxed{2002}.", "It is \\boxed{2,002}", "It is \\boxed{3}.", "It is 2002.")
    samples = [Sample(f"s1/e0-r0/{i}", prompt, completion, text) for i, text in enumerate(texts)]
    assert [scored.total for scored in score(rewards, samples)] == pytest.approx([1.1, 1.1, 0.1, 0.0])


# ---- names and links --------------------------------------------------------------------------------------


@each_document
def test_relative_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists() and there.is_relative_to(ROOT), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{path.name} links to {target}, which has no such heading"


@each_document
def test_files_and_tests_that_are_named_exist(path):
    text = path.read_text("utf-8")
    files = re.findall(r"(?<![\w/.])((?:gspo|tests|docs|recipes|benchmarks)/[\w./-]+\.(?:py|md|toml))", text)
    assert not [f for f in files if not (ROOT / f).exists()]
    every = "\n".join(p.read_text("utf-8") for p in (ROOT / "tests").glob("*.py"))
    tests = re.findall(r"`(test_\w+)`", text)
    assert not [name for name in tests if f"def {name}(" not in every]


def test_the_tree_in_the_readme_has_every_module():
    (tree,) = (block for block in blocks(README, "") if block.startswith("gspo/"))
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "gspo").rglob("*.py") if p.name != "__init__.py"}
    assert listed(tree) == modules


def test_the_floors_in_the_architecture_are_the_houses():
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| (\d) \| ([^|]*) \|", text, re.MULTILINE))
    assert {int(k): set(re.findall(r"`(\w+)`", v)) for k, v in rows.items()} == dict(enumerate(map(set, FLOORS)))
