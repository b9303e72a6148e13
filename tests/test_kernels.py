"""Compiled layers are the written ones in value and gradient, for the update alone; kernels that do not fit are refused."""

import functools
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import sampled, tiny_model, tiny_policy
from moe_support import EXPERTS

from gspo.config import ModelConfig
from gspo.training.kernels import KernelError, compile_layers, uncompiled, use_liger
from gspo.training.packing import make_micro_batches
from gspo.training.policy import _compiling_pays, load_policy
from gspo.training.pretrained import ModelError

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")


def policy_with(settings, **shape):
    return load_policy(tiny_model(**shape).model_copy(update=settings), temperature=1.0, seed=0)


def compiled_policy(**shape):
    return policy_with({"kernels": "compile"}, **shape)


@needs_compiler
@pytest.mark.filterwarnings("ignore")  # of the compiler about itself
def test_compiled_layers_equal_written_ones_at_every_length_and_compile_once():
    written, compiled = tiny_policy(num_layers=3), compiled_policy(num_layers=3)
    samples = sampled(compiled, [3, 5, 2, 7, 6, 4])
    frames = torch._dynamo.utils.counters["frames"]
    counts = []
    for budget in (20, 40, 100):
        batches = make_micro_batches(samples, token_budget=budget)
        for micro in batches:
            for policy in (written, compiled):
                policy.score(micro)[0].sum().backward()
        counts.append(frames["ok"])
        for name, p in written.trainable.items():
            assert float((compiled.trainable[name].grad - p.grad).norm()) <= 1e-5 * float(p.grad.norm()), name
    assert counts[0] > 0 and counts[0] == counts[-1]


@needs_compiler
@pytest.mark.filterwarnings("ignore")
def test_sampling_runs_the_layers_as_they_are_written():
    compiled, written = compiled_policy(), tiny_policy()
    frames = torch._dynamo.utils.counters["frames"]
    before = frames["total"]
    mine, theirs = sampled(compiled, [3, 5]), sampled(written, [3, 5])
    assert frames["total"] == before
    for a, b in zip(mine, theirs, strict=True):
        assert (a.token_ids == b.token_ids).all() and (a.engine_logprobs == b.engine_logprobs).all()


def kept_bytes_and_gradients(policy, samples):
    """Bytes that the forward pass keeps for the backward pass, and the gradients."""
    (micro,) = make_micro_batches(samples, token_budget=1000)
    kept = {}
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(lambda x: (kept.update({x.data_ptr(): x.nbytes}), x)[1], lambda x: x):
        logp_T = policy.score(micro)[0]
    logp_T.sum().backward()
    return sum(kept.values()), {name: p.grad for name, p in policy.trainable.items()}


@pytest.mark.parametrize("kernels", ["torch", pytest.param("compile", marks=needs_compiler)])
@pytest.mark.filterwarnings("ignore")
def test_checkpointing_keeps_less_and_changes_no_gradient(kernels):
    samples = sampled(tiny_policy(), [30, 50, 20, 70])
    kept, gradients = {}, {}
    for kind in ("none", "selective", "full"):
        policy = policy_with({"kernels": kernels, "checkpointing": kind}, num_layers=4)
        kept[kind], gradients[kind] = kept_bytes_and_gradients(policy, samples)
    assert kept["full"] < 0.6 * kept["none"]
    assert kernels == "compile" or kept["full"] < kept["selective"] < 0.85 * kept["none"]
    for kind in ("selective", "full"):
        for name, gradient in gradients["none"].items():
            assert float((gradients[kind][name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), (kind, name)


@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.filterwarnings("ignore")
def test_with_checkpointing_too_all_layers_share_the_compiled_code(kind, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # graphs, and no machine code
    samples, compiled = sampled(tiny_policy(), [3, 5]), []
    for layers in (2, 4):
        torch._dynamo.reset()
        before = torch._dynamo.utils.counters["frames"]["total"]
        with uncompiled():  # the comparison at loading
            policy = policy_with({"kernels": "compile", "checkpointing": kind}, num_layers=layers)
        kept_bytes_and_gradients(policy, samples)
        compiled.append(torch._dynamo.utils.counters["frames"]["total"] - before)
    assert compiled[0] == compiled[1] > 0


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_checkpointing_does_not_touch_sampling(kind):
    mine, theirs = (sampled(p, [3, 5]) for p in (policy_with({"checkpointing": kind}), tiny_policy()))
    assert all((a.token_ids == b.token_ids).all() for a, b in zip(mine, theirs, strict=True))


def test_a_model_without_a_list_of_layers_is_refused():
    with pytest.raises(KernelError, match=r'kernels = "compile": Linear has no list of layers: use "torch"'):
        compile_layers(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    "kind, device, told",
    [("qwen3", "cpu", "needs a GPU, and this model is on cpu"), ("gpt2", "cuda", "no kernels for models of the kind gpt2")],
)
def test_liger_is_refused_where_it_does_not_fit(monkeypatch, kind, device, told):
    patch = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"qwen3": None})
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", SimpleNamespace(_apply_liger_kernel_to_instance=None))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", patch)
    model = SimpleNamespace(config=SimpleNamespace(model_type=kind), device=torch.device(device))
    with pytest.raises(KernelError, match=told):
        use_liger(model)


def test_liger_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(ModelError, match=r"pip install 'gspo\[liger\]'"):
        load_policy(tiny_model().model_copy(update={"kernels": "liger"}), temperature=1.0, seed=0)


def test_kernels_that_compute_something_else_are_refused_by_the_comparison_at_loading(monkeypatch):
    def spoil(model):
        model.model.norm.forward = lambda x: x

    monkeypatch.setattr("gspo.training.policy.use_liger", spoil)
    with pytest.raises(ModelError, match="packed logits differ from the model's own"):
        load_policy(tiny_model().model_copy(update={"kernels": "liger"}), temperature=1.0, seed=0)


def test_a_cpu_runs_the_layers_as_they_are_written_unless_told(monkeypatch):
    monkeypatch.setattr("gspo.training.policy.compile_layers", lambda backbone: pytest.fail("compiled"))

    tiny_policy()


def saved(model, tokenizer, folder):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ModelConfig(path=str(folder), device="cpu")


def shape(tokenizer):
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    return {"vocab_size": len(tokenizer), "num_key_value_heads": 1, "max_position_embeddings": 512, **small, **ends}


def test_a_window_as_long_as_the_longest_sequence_hides_nothing(tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    tokenizer = tiny_policy().tokenizer
    for window, fits in ((511, False), (512, True)):
        model = MistralForCausalLM(MistralConfig(**shape(tokenizer), sliding_window=window))
        config = saved(model, tokenizer, tmp_path / str(window))
        if fits:
            sampled(load_policy(config, temperature=1.0, seed=0), [3, 5])
        else:
            with pytest.raises(ModelError, match="sliding window of 511"):
                load_policy(config, temperature=1.0, seed=0)


def test_attention_that_caps_its_logits_is_refused_at_loading(tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    tokenizer = tiny_policy().tokenizer
    own = {"layer_types": ["full_attention"] * 2, "sliding_window": 4096, "final_logit_softcapping": None}
    model = Gemma2ForCausalLM(Gemma2Config(**shape(tokenizer), **own))
    with pytest.raises(ModelError, match="attention with softcap is not handled"):
        load_policy(saved(model, tokenizer, tmp_path), temperature=1.0, seed=0)


def test_layers_that_torch_cannot_compile_end_in_a_sentence(monkeypatch):
    def broken(*args, **kwargs):
        raise torch._dynamo.exc.InternalTorchDynamoError("InvalidCxxCompiler: no g++\nand much more")

    def without_compiler(backbone):
        backbone.layers[0].forward = broken

    monkeypatch.setattr("gspo.training.policy.compile_layers", without_compiler)
    told = r'torch cannot compile its layers \(InvalidCxxCompiler: no g\+\+\): .*or set model.kernels = "torch"'
    with pytest.raises(ModelError, match=told):
        load_policy(tiny_model().model_copy(update={"kernels": "compile"}), temperature=1.0, seed=0)


def test_auto_compiles_dense_models_on_a_gpu_alone():
    dense, mixture = policy_with({}), policy_with({}, **EXPERTS)
    assert not _compiling_pays(dense) and not _compiling_pays(mixture)
    for policy, pays in ((dense, True), (mixture, False)):
        policy.device = torch.device("cuda")
        assert _compiling_pays(policy) is pays
