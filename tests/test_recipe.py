"""Recipes: what they may say, what the command line may change, and the sentence for each fault."""

import copy
import json
import re
import tomllib
from pathlib import Path

import pydantic
import pytest

from gspo.config import reward_name
from gspo.recipe import RecipeError, build, differences, load, parse_overrides

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))

TOML = """
name = "try"
[model.create]
alphabet = "01"
[data]
source = "jsonl"
path = "rows.jsonl"
[[rewards]]
type = "exact"
[[rewards]]
type = "length_penalty"
free_tokens = 4
max_tokens = 8
weight = 0.5
[rollout]
prompts_per_step = 4
group_size = 6
max_prompt_tokens = 16
max_response_tokens = 8
[training]
steps = 3
[evaluation]
max_response_tokens = 8
samples = 4
pass_at = [1, 4]
[evaluation.data]
source = "reasoning_gym"
task = "gcd"
size = 10
parameters = { min_numbers = 2, max_numbers = 2 }
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "try.toml"
    path.write_text(TOML)
    return path


def changed(key: str, value: object) -> dict:
    """The values of the recipe with one of them changed, or left out if the new one is `...`."""
    values = copy.deepcopy(tomllib.loads(TOML))
    *tables, last = key.split(".")
    inside = values
    for table in tables:
        inside = inside[int(table)] if table.isdigit() else inside.setdefault(table, {})  # type: ignore[index]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    return values


def fault(key: str, value: object) -> str:
    with pytest.raises(RecipeError) as caught:
        build(changed(key, value), "try.toml")
    return str(caught.value)


def word_fault(recipe: Path, *words: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(recipe, words)
    return str(caught.value).replace(str(recipe), "try.toml")


# ---- what is read -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_every_shipped_recipe_loads(path):
    assert load(path).name


def test_values_and_defaults_are_read(recipe):
    config = load(recipe)
    assert (config.name, config.training.steps, config.training.minibatches) == ("try", 3, 4)
    assert [reward_name(r) for r in config.rewards] == ["exact", "length_penalty"]
    assert [r.weight for r in config.rewards] == [1.0, 0.5]
    assert (config.objective.name, config.objective.kl, config.advantage.std) == ("gspo", None, "sample")
    assert config.rollout.temperature == 1.0 and config.cold_start is None


def test_a_byte_order_mark_is_no_fault(recipe):
    recipe.write_bytes(b"\xef\xbb\xbf" + TOML.encode())
    assert load(recipe).name == "try"


def test_what_was_resolved_can_be_read_again(recipe):
    config = load(recipe)
    assert build(json.loads(json.dumps(config.model_dump(mode="json")))) == config


def test_a_configuration_is_frozen(recipe):
    config = load(recipe)
    for section, key in ((config, "name"), (config.training, "steps"), (config.rewards[0], "weight")):
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            setattr(section, key, 1)


def test_differences_name_dotted_keys():
    old = {"a": 1, "b": {"c": 2, "d": [1, 2]}, "e": None}
    assert differences(old, copy.deepcopy(old)) == []
    assert differences(old, {"a": 2, "b": {"c": 2, "d": [1]}, "f": 0}) == ["a", "b.d", "f"]


# ---- overrides --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--training.learning_rate", "1e-6"], "training.learning_rate", 1e-6),
        (["--training.learning_rate=1e-6"], "training.learning_rate", 1e-6),
        (["--training.steps", "7"], "training.steps", 7),
        (["--name", "5"], "name", "5"),
        (["--tracking.tensorboard", "true"], "tracking.tensorboard", True),
        (["--tracking.tensorboard", "false"], "tracking.tensorboard", False),
        (["--evaluation.pass_at", "[1, 2]"], "evaluation.pass_at", [1, 2]),
        (["--evaluation.data.size", "99"], "evaluation.data.size", 99),
        (["--evaluation.data.parameters", '{"min_numbers": 3}'], "evaluation.data.parameters.min_numbers", 3),
        (["--evaluation.data.parameters", '{"type": "x"}'], "evaluation.data.parameters.max_numbers", 2),
        (["--training", '{"steps": 8}'], "training.steps", 8),
        (["--training", '{"steps": 8}'], "training.minibatches", 4),
        (["--data.template", "{a}*{b}="], "data.template", "{a}*{b}="),
        (["--data.path", "a=b.jsonl"], "data.path", "a=b.jsonl"),
        (["--evaluation", "null"], "evaluation", None),
        (["--model.lora.rank", "4"], "model.lora.rank", 4),
        (["--model.lora.target_modules", '["q_proj"]'], "model.lora.target_modules", ["q_proj"]),
        (["--model.create", "null", "--model.path", "some/folder"], "model.path", "some/folder"),
    ],
)
def test_the_command_line_is_laid_over_the_recipe(recipe, words, key, value):
    found = load(recipe, words)
    for part in key.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value and type(found) is type(value)


def test_an_override_leaves_everything_else_alone(recipe):
    old, new = (load(recipe, w).model_dump(mode="json") for w in ([], ["--rollout.temperature", "0.7"]))
    assert differences(old, new) == ["rollout.temperature"]
    assert parse_overrides([]) == {}


def test_several_keys_of_a_table_that_the_recipe_lacks_make_one(recipe):
    words = ["--objective.kl.coefficient", "0.1", "--objective.kl.estimator", "k3", "--objective.kl.place", "loss"]
    kl = load(recipe, words).objective.kl
    assert kl is not None and (kl.coefficient, kl.estimator, kl.place) == (0.1, "k3", "loss")


def test_a_list_of_tables_is_given_whole_as_json(recipe):
    config = load(recipe, ["--rewards", '[{"type": "numeric", "tolerance": 0.5}]'])
    assert [(r.type, r.tolerance) for r in config.rewards] == [("numeric", 0.5)]  # type: ignore[union-attr]


def test_a_source_of_another_kind_replaces_the_recipes_whole_table(recipe):
    config = load(recipe, ["--evaluation.data", '{"source": "jsonl", "path": "held_out.jsonl"}'])
    assert config.evaluation is not None and config.evaluation.data.model_dump()["path"] == "held_out.jsonl"
    kept = load(recipe, ["--evaluation.data", '{"source": "reasoning_gym", "size": 5}'])
    assert kept.evaluation is not None and kept.evaluation.data.model_dump()["task"] == "gcd"


# ---- unknown keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("traning", "unknown key traning; the nearest known one is training"),
        ("training.learning_rat", "unknown key training.learning_rat; the nearest known one is training.learning_rate"),
        ("training.lr", "unknown key training.lr; the nearest known one is training.learning_rate"),
        ("training.min", "unknown key training.min; the nearest known one is training.minibatches"),
        ("training.group_size", "unknown key training.group_size; the nearest known one is rollout.group_size"),
        ("rewards.1.wieght", "unknown key rewards.1.wieght; the nearest known one is rewards.1.weight"),
        ("rewards.0.pattern", "rewards.0.pattern does not go with rewards.0.type = exact, only with format"),
        ("data.tempalte", "unknown key data.tempalte; the nearest known one is data.template"),
        ("data.task", "data.task does not go with data.source = jsonl, only with reasoning_gym"),
        ("evaluation.data.sise", "unknown key evaluation.data.sise; the nearest known one is evaluation.data.size"),
        ("evaluation.data.path", "evaluation.data.path does not go with evaluation.data.source = reasoning_gym, only with"),
        ("model.create.xyzzy", "unknown key model.create.xyzzy; known here: alphabet, hidden_size, intermediate_size"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_known_one(key, sentence):
    assert fault(key, 1).startswith(f"try.toml: {sentence}")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--training.learning_rat", "1"], "unknown key training.learning_rat; the nearest known one is training.learn"),
        (["--training.group_size", "1"], "unknown key training.group_size; the nearest known one is rollout.group_size"),
        (["--trainig.steps", "1"], "unknown key trainig.steps; the nearest known one is training.steps"),
        (["--lr=1"], "unknown key lr; the nearest known one is training.learning_rate"),
        (["--steps", "1"], "unknown key steps; the nearest known one is training.steps"),
        (["--evaluation.data.sise", "1"], "unknown key evaluation.data.sise; the nearest known one is evaluation.data."),
        (["--rewards.0.weight", "2"], "unknown key rewards.0.weight: rewards is given as JSON: --rewards '[{...}]'"),
        (["--rewards.weight", "2"], "unknown key rewards.weight: rewards is given as JSON"),
        (["--data.parameters.a", "2"], "unknown key data.parameters.a: data.parameters is given as JSON: --data.param"),
        (["--xyzzy", "2"], "unknown key xyzzy; known here: name, output, seed"),
        (["training.steps=3"], "'training.steps=3' is no setting: give one as --table.key VALUE"),
        (["--training.steps"], "argument --training.steps: expected one argument"),
        (["--evaluation.pass_at", "[1,"], "--evaluation.pass_at: "),
    ],
)  # fmt: skip
def test_words_that_are_no_settings_are_refused(recipe, words, sentence):
    assert word_fault(recipe, *words).startswith(f"command line: {sentence}")


def test_a_fault_is_laid_where_it_was_made(recipe):
    assert word_fault(recipe, "--training.steps", "many") == "command line: training.steps = 'many': must be a whole number"
    assert word_fault(recipe, "--data.task", "gcd").startswith("command line: data.task does not go with")
    for words in (("--rollout.correction", "{}"), ("--rollout.correction.level", "token")):
        assert "command line: rollout.correction.mode is missing" in word_fault(recipe, *words).splitlines()
    recipe.write_text(TOML.replace("steps = 3", "steps = 0"))
    assert word_fault(recipe, "--training.minibatches", "2") == "try.toml: training.steps = 0: must be greater than 0"


def test_several_faults_are_several_lines():
    values = changed("training.steps", 0) | {"seed": -1, "nmae": "x"}
    with pytest.raises(RecipeError) as caught:
        build(values, "try.toml")
    assert sorted(str(caught.value).splitlines()) == [
        "try.toml: seed = -1: must be 0 or more",
        "try.toml: training.steps = 0: must be greater than 0",
        "try.toml: unknown key nmae; the nearest known one is name",
    ]


# ---- wrong values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("solved_at", 1.01, "solved_at = 1.01 is more than the rewards can add up to, 1: no response would"),
        ("training.learning_rate", "fast", "training.learning_rate = 'fast': must be a number"),
        ("training.learning_rate", float("nan"), "training.learning_rate = nan: must be a finite number"),
        ("training.learning_rate", float("inf"), "training.learning_rate = inf: must be a finite number"),
        ("training.learning_rate", True, "training: learning_rate must be a number, not true or false"),
        ("training.learning_rate", "1e-6", 'training: learning_rate must be a number, not the text "1e-6"'),
        ("evaluation.pass_at", ["1"], 'evaluation: pass_at must be a number, not the text "1"'),
        ("rollout.vllm.sleep", "yes", 'rollout.vllm: sleep must be true or false, not the text "yes"'),
        ("training.learning_rate", 0, "training.learning_rate = 0: must be greater than 0"),
        ("training.steps", 1.5, "training.steps = 1.5: must be a whole number"),
        ("training.steps", True, "training: steps must be a number, not true or false"),
        ("evaluation.pass_at", [True], "evaluation: pass_at must be a number, not true or false"),
        ("evaluation.pass_at", 1, "evaluation.pass_at = 1: must be a list"),
        ("evaluation.pass_at", [0], "evaluation.pass_at.0 = 0: must be greater than 0"),
        ("rewards.1.weight", float("nan"), "rewards.1.weight = nan: must be a finite number"),
        ("rewards.1.weight", True, "rewards.1: weight must be a number, not true or false"),
        ("rollout.group_size", 1, "rollout.group_size = 1: must be 2 or more"),
        ("tracking.tensorboard", "maybe", "tracking.tensorboard = 'maybe': must be true or false"),
        ("tracking.wandb", True, "tracking.wandb = True: must be text"),
        ("objective.name", "GSPO", "objective.name = 'GSPO': must be 'gspo', 'gspo_token', 'grpo' or 'dapo'"),
        ("objective.clip_low", 1.0, "objective.clip_low = 1.0: must be less than 1"),
        ("model.lora", {"target_modules": 5}, "model.lora.target_modules = 5: must be a list, or 'all-linear'"),
        ("training", "x", "training = 'x': must be a table"),
        ("training", ..., "training is missing"),
        ("rollout.max_response_tokens", ..., "rollout.max_response_tokens is missing"),
        ("name", "a/b", "name: 'a/b' cannot name a folder: use letters, digits, dots"),
        ("seed", 2**63, "seed = 9223372036854775808: must be less than 9223372036854775808"),
        ("rewards", [], "rewards = []: must have at least 1 item"),
        ("rewards", {"type": "exact"}, "rewards = {'type': 'exact'}: must be a list of tables: write [[rewards]] with two"),
        ("rewards", ["exact"], "rewards.0 = 'exact': must be a table"),
        ("rewards.0.type", "maths", "rewards.0.type = 'maths': must be one of 'exact', 'numeric', 'last_number', 'math'"),
        ("rewards.0.type", ..., "rewards.0.type is missing: use one of exact, numeric, last_number, math"),
        ("data.source", "json", "data.source = 'json': must be one of 'jsonl', 'parquet'"),
        (
            "data.source",
            ...,
            "data.source is missing: use one of jsonl, parquet, dataset, reasoning_gym, verifiers, python",
        ),
        ("data.path", ..., "data.path is missing"),
        ("objective.kl", {"coefficient": 0.1}, "objective.kl.estimator is missing"),
    ],
)
def test_a_wrong_value_is_refused_in_a_clear_sentence(key, value, sentence):
    assert fault(key, value).startswith(f"try.toml: {sentence}")


def test_no_sentence_speaks_of_the_library_that_checks():
    for key, value in (
        ("training", 3),
        ("rewards", 3),
        ("data", 3),
        ("model", []),
        ("name", 3),
        ("seed", "x"),
        ("data.path", 1),
    ):
        assert not re.search("pydantic|instance|dictionary|discriminator|tag|Input|input|Config", fault(key, value))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name = ", "is not TOML: Invalid value"),
        ("[a]\nx = 1\n[a]", "is not TOML: Cannot declare"),
        ("\xff", "cannot be read"),
    ],
)
def test_bad_toml_is_refused_with_its_place(recipe, text, sentence):
    recipe.write_bytes(text.encode("latin-1"))
    assert word_fault(recipe).startswith(f"try.toml: {sentence}")


def test_a_missing_recipe_is_named(tmp_path):
    with pytest.raises(RecipeError, match=r"none\.toml: there is no such recipe"):
        load(tmp_path / "none.toml")
    with pytest.raises(RecipeError, match="cannot be read"):
        load(tmp_path)


# ---- settings against each other --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("training.minibatches", 5,
         "rollout.prompts_per_step x rollout.group_size = 4 x 6 = 24 samples do not split into training.minibatches = 5 "
         "equal parts: use prompts_per_step = 5, or minibatches = 4 or 6"),
        ("training.minibatches", 9,
         "rollout.prompts_per_step x rollout.group_size = 4 x 6 = 24 samples do not split into training.minibatches = 9 "
         "equal parts: use prompts_per_step = 3 or 6, or minibatches = 8 or 12"),
        ("training", {"steps": 1, "groups": "keep", "minibatches": 3},
         "rollout.prompts_per_step = 4 groups do not split into training.minibatches = 3 equal parts: "
         "use prompts_per_step = 3 or 6, or minibatches = 2 or 4"),
        ("training.micro_batch_tokens", 23,
         "training.micro_batch_tokens = 23 is smaller than the longest sample, "
         "rollout.max_prompt_tokens + rollout.max_response_tokens = 16 + 8: use 24 or more"),
        ("model.create.max_position_embeddings", 23,
         "model.create.max_position_embeddings = 23 is smaller than the longest sample, rollout.max_prompt_tokens + "
         "rollout.max_response_tokens = 16 + 8: use 24 or more"),
        ("rollout.top_p", 0.9, "rollout: top_p = 0.9: the update's distribution has the full support"),
        ("rollout.top_k", 5, "rollout: top_k = 5: the update's distribution has the full support"),
        ("rollout.min_p", 0.1, "rollout: min_p = 0.1: the update's distribution has the full support"),
        ("rollout.temperature", 0, "rollout: temperature = 0: greedy responses of a group are all alike"),
        ("evaluation.pass_at", [1, 8], "evaluation: pass@8 is undefined with samples = 4: use samples = 8 or more"),
        ("rewards", [{"type": "exact"}] * 2, "two rewards are called exact: give each a name of its own"),
        ("rewards.1.free_tokens", 8, "rewards.1: max_tokens (8) must be larger than free_tokens (8)"),
        ("model.path", "x", "model: set exactly one of path (a folder or hub name) and create (a small random model)"),
        ("model", {}, "model: set exactly one of path (a folder or hub name) and create (a small random model)"),
        ("model.create.num_kv_heads", 3, "model.create: num_heads = 4 is not a multiple of num_kv_heads = 3: "
         "use num_kv_heads = 2 or 4"),
        ("model.create.hidden_size", 100, "model.create: hidden_size = 100 does not split into num_heads = 4 heads of an "
         "even width: use hidden_size = 96 or 104"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_each_other_are_refused_with_values_that_do(key, value, sentence):
    assert fault(key, value).startswith(f"try.toml: {sentence}")


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("rollout.prompts_per_step", (3, 6)),
        ("training.minibatches", (8, 12)),
    ],
)
def test_the_values_that_a_sentence_offers_are_valid(key, values):
    for value in values:
        both = changed(key, value)
        if key != "training.minibatches":
            both["training"]["minibatches"] = 9
        assert build(both)


def test_evaluation_may_truncate_its_distribution_and_be_greedy():
    for key, value in (("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("temperature", 0)):
        assert build(changed(f"evaluation.{key}", value))


def test_rewards_alike_may_be_told_apart_by_name():
    assert build(changed("rewards", [{"type": "exact"}, {"type": "exact", "name": "again"}]))
    functions = [{"type": "function", "function": f"{f}.py:score"} for f in "ab"]
    assert "two rewards are called score" in fault("rewards", functions)
