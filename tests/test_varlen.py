"""Varlen kernels run on GPUs alone. Here plain stand-ins with their signatures are between the same lines: where segments
start, what is joined, what goes backward, what a compiled graph holds, and which kernels are chosen."""

import sys
import types

import pytest
import test_attention
import torch

from gspo.training import varlen
from gspo.training.attention import Layout, Segment, packed_attention
from gspo.training.kernels import KernelError
from gspo.training.varlen import Kernels


def runs_of(runs, causal, query, key):
    """Each run's places among queries and keys, and the pairs that are not seen."""
    start_q, start_k, longest_q, longest_k = runs
    assert start_q.dtype == start_k.dtype == torch.int32 and len(start_q) == len(start_k)
    assert (start_q[-1], start_k[-1]) == (len(query), len(key))
    for i in range(len(start_q) - 1):
        q, k = slice(*start_q[i : i + 2]), slice(*start_k[i : i + 2])
        n, m = q.stop - q.start, k.stop - k.start
        assert n <= longest_q and m <= longest_k
        hidden = torch.arange(m) > m - n + torch.arange(n)[:, None]
        yield q, k, hidden if causal else torch.zeros_like(hidden)


def scores(query, key, hidden, scale):
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return torch.einsum("nhd,mhd->hnm", query, key).mul(scale).masked_fill(hidden, float("-inf"))


def forward(query, key, value, runs, *, causal, scale):
    out, norm = torch.zeros_like(query), query.new_zeros(query.shape[1], len(query))
    for q, k, hidden in runs_of(runs, causal, query, key):
        score = scores(query[q], key[k], hidden, scale)
        v = value[k].repeat_interleave(query.shape[1] // value.shape[1], 1)
        out[q], norm[:, q] = torch.einsum("hnm,mhd->nhd", score.softmax(-1), v), score.logsumexp(-1)
    return out, norm


def backward(grad, query, key, value, out, norm, runs, *, causal, scale):
    """By the logsumexp and the result that it is given, as the kernels do (Dao et al., arXiv:2205.14135, algorithm 4)."""
    assert norm.is_contiguous() and grad.is_contiguous()
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    per = query.shape[1] // key.shape[1]
    for q, k, hidden in runs_of(runs, causal, query, key):
        share = (scores(query[q], key[k], hidden, scale) - norm[:, q, None]).exp()
        v = value[k].repeat_interleave(per, 1)
        inner = (grad[q] * out[q]).sum(-1).T[..., None]
        score = share * (torch.einsum("nhd,mhd->hnm", grad[q], v) - inner) * scale
        grads[0][q] += torch.einsum("hnm,mhd->nhd", score, key[k].repeat_interleave(per, 1))
        for total, x in ((grads[1], torch.einsum("hnm,nhd->mhd", score, query[q])),
                         (grads[2], torch.einsum("hnm,nhd->mhd", share, grad[q]))):  # fmt: skip
            total[k] += x.unflatten(1, (-1, per)).sum(2)
    return tuple(grads)


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.setattr("gspo.training.varlen._kernels", lambda query: Kernels(forward, backward))
    monkeypatch.setattr("gspo.training.attention.has_kernels", lambda query, dropout: True)


@pytest.mark.parametrize(
    ("width", "dtype", "dropout", "on_gpu", "used"),
    [
        (256, torch.bfloat16, 0.0, True, True),
        (96, torch.float16, 0.0, True, True),
        (264, torch.bfloat16, 0.0, True, False),
        (100, torch.bfloat16, 0.0, True, False),
        (128, torch.float32, 0.0, True, False),
        (128, torch.bfloat16, 0.1, True, False),
        (128, torch.bfloat16, 0.0, False, False),
    ],
)
def test_kernels_are_for_half_precision_on_gpus_and_widths_up_to_256(width, dtype, dropout, on_gpu, used):
    query = types.SimpleNamespace(is_cuda=on_gpu, dtype=dtype, shape=(7, 4, width))
    assert varlen.has_kernels(query, dropout) is used


@pytest.mark.parametrize("shape", test_attention.SHAPES)
def test_segments_by_varlen_kernels_are_those_of_plain_attention(shape, stand_ins):
    test_attention.test_packed_attention_is_each_segment_after_its_prompt_in_value_and_gradient(shape)


def test_a_compiled_graph_takes_it_in_whole_and_serves_every_number_of_segments(stand_ins):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def layer(x, layout):
        query, key = x.view(1, -1, 4, 8).transpose(1, 2), x[:, :16].view(1, -1, 2, 8).transpose(1, 2)
        return packed_attention(None, query * 2, key, key, None, layout=layout)[0].flatten(2).sum(0)

    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    alike, prompts = [[(5,), (4,)], [(9,), (3,), (2,), (2,)], [(30,)]], [[(5,), (4, 0), (3, 0)], [(3,), (9,), (6, 1)]]
    for shape in (*alike, *prompts, *alike, *prompts):
        layout = Layout.of([Segment(*s) for s in shape])
        x = torch.randn(sum(s[0] for s in shape), 32)
        torch.testing.assert_close(compiled(x, layout), layer(x, layout))
    assert len(graphs) <= 3, "with shared prompts, without; one segment alone may be a case of its own"


# ---- the choice of kernels --------------------------------------------------------------------------------


@pytest.fixture
def flash_attention(monkeypatch):
    """Stand-ins for the package's functions, on a GPU that it is made for."""

    def fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, return_lse):
        runs = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return *forward(q, k, v, runs, causal=causal, scale=softmax_scale), None, None, None

    def bwd(
        q, k, v, out, dout, lse, softmax_scale, causal, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    ):  # fmt: skip
        runs = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return backward(dout, q, k, v, out, lse, runs, causal=causal, scale=softmax_scale)

    modules = {name: types.ModuleType(name) for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")}
    modules["flash_attn.cute.interface"].__dict__.update(_flash_attn_fwd=fwd, _flash_attn_bwd=bwd)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("importlib.metadata.version", {"flash-attn-4": "4.0.0"}.__getitem__)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda gpu: (9, 0))
    return modules["flash_attn.cute.interface"]


@pytest.mark.parametrize(("capability", "used"), [((9, 0), True), ((10, 0), True), ((8, 0), False), ((12, 0), False)])
def test_flash_attention_is_used_where_it_is_installed_and_made_for_the_gpu(capability, used, flash_attention, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda gpu: capability)
    found = varlen.flash_attention.__wrapped__(0)
    assert (found is not None) == used
    if found:
        query, key = torch.randn(9, 4, 8), torch.randn(9, 2, 8)
        starts = torch.tensor([0, 5, 9], dtype=torch.int32)
        options = {"causal": True, "scale": 0.3}
        out, norm = found.forward(query, key, key, (starts, starts, 5, 5), **options)
        wanted = forward(query, key, key, (starts, starts, 5, 5), **options)
        torch.testing.assert_close((out, norm), wanted)
        grads = found.backward(out, query, key, key, out, norm, (starts, starts, 5, 5), **options)
        torch.testing.assert_close(grads, backward(out, query, key, key, *wanted, (starts, starts, 5, 5), **options))


def test_flash_attention_of_another_age_is_refused(flash_attention, monkeypatch):
    monkeypatch.setattr(flash_attention, "_flash_attn_bwd", lambda q, k, v, out, dout, lse: None)
    with pytest.raises(KernelError, match=r"flash-attn-4 4\.0\.0 is installed .*takes no cu_seqlens_k"):
        varlen.flash_attention.__wrapped__(0)
    monkeypatch.delattr(flash_attention, "_flash_attn_bwd")
    with pytest.raises(KernelError, match="_flash_attn_bwd"):
        varlen.flash_attention.__wrapped__(0)


@pytest.mark.parametrize("installed", [True, False])
def test_flash_attention_without_what_it_needs_is_refused_where_it_is_installed(tmp_path, monkeypatch, installed):
    """flash-attn 2 brings a folder of the same name, which needs what it does not."""
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import no_such_compiler")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda gpu: (9, 0))
    if not installed:
        assert varlen.flash_attention.__wrapped__(0) is None
        return
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.0.0b1")
    with pytest.raises(KernelError, match=r"flash-attn-4 4.0.0b1 is installed but .*no_such_compiler.*uninstall it"):
        varlen.flash_attention.__wrapped__(0)
