"""AOTInductor packages: real ones, made once, and every call that torch's own loader answers wrongly or dies of."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import fuseboard as fb
from fuseboard.engine import aot
from fuseboard.engine.aot import archive
from fuseboard.engine.aot.exporting import _alone
from fuseboard.engine.aot.graph import GraphSizes, attention_guards, value_limits
from fuseboard.engine.aot.tracing import attention_in_trace
from fuseboard.engine.freeze import NotFrozenError
from fuseboard.policy import policy_for

COMPILER = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
OLD = torch.__version__.startswith("2.6.")
PACKAGES = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler to build a package"),
    # torch's own, of its own code, while it compiles.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
pytestmark = PACKAGES

SITE = fb.Site("tests.aot")


class Case(nn.Module):
    """O-15: attention whose operands are reordered in fused code."""

    def forward(self, q, k, v):
        return fb.attention(2 * q.relu(), k, v, site=SITE) * 3


class Encoder(nn.Module):
    """Two rows of a length that is a multiple of 16; weights of the head in bf16, an option that is no tensor."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.project = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3).bfloat16()

    def forward(self, ids, mask, *, normalise):
        h = self.project(self.embed(ids))
        b, n, _ = h.shape
        x = h.view(b, n, 2, 8).transpose(1, 2)
        h = fb.attention(x, x, x, site=SITE, mask=mask[:, None, None, :]).transpose(1, 2).reshape(b, n, 16)
        pooled = h.view(b, n // 16, 16, 16).mean(2).sum(1)
        if normalise:
            pooled = pooled / n
        return self.head(pooled.bfloat16()), {"pooled": pooled, "hidden": h}


def qkv(batch=1, length=4):
    generator = torch.Generator().manual_seed(batch + length)
    return [torch.randn(batch, 2, length, 8, generator=generator) for _ in range(3)]


def text(rows=2, length=48):
    generator = torch.Generator().manual_seed(rows + length)
    ids = torch.randint(0, 32, (rows, length), generator=generator)
    mask = torch.rand(rows, length, generator=generator) > 0.3
    mask[:, :1] = True
    return ids, mask


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("packages")


@pytest.fixture(scope="module")
def static(folder):
    return aot.export(Case(), tuple(qkv()), folder / "static.pt2", meta={"labels": ["a", "b"]})


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    return Encoder().eval()


@pytest.fixture(scope="module")
def dynamic(folder, encoder):
    ids, mask = text()
    # torch 2.6 writes C++ for 16 * Dim that does not compile.
    length = torch.export.Dim.AUTO if OLD else 16 * torch.export.Dim("sixteens", min=1, max=8)
    return aot.export(
        encoder, (ids, mask), folder / "dynamic.pt2", kwargs={"normalise": True}, policy="auto" if OLD else "exact",
        dynamic_shapes={"ids": {1: length}, "mask": {1: length}, "normalise": None},
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(static):
    return aot.load(static)


@pytest.fixture(scope="module")
def encode(dynamic):
    return aot.load(dynamic)


def refused(package, *args, **kwargs) -> str:
    with pytest.raises(aot.ContractError) as error:
        package(*args, **kwargs)
    return str(error.value)


# ---- O-15: eight calls


def test_a_call_as_exported_gives_what_eager_gives(run):
    for _ in range(3):
        assert torch.allclose(run(*qkv()), Case()(*qkv()), atol=1e-5)
    fresh = [torch.randn(1, 2, 4, 8) for _ in range(3)]
    assert torch.allclose(run(*fresh), Case()(*fresh), atol=1e-5)


def transposed():
    return [each.transpose(1, 2).contiguous().transpose(1, 2) for each in qkv()]


def sliced():
    return [each[:, :, :4] for each in qkv(1, 9)]


@pytest.mark.parametrize("views", [transposed, sliced])
def test_views_in_another_layout_are_refused_or_copied_when_asked_to(static, run, views):
    message = refused(run, *views())

    assert "q: has strides (" in message
    assert "contiguous, strides (64, 32, 8, 1) (q.contiguous(), or load with contiguous=True)" in message
    copying = aot.load(static, contiguous=True)
    for _ in range(2):  # the second time from what is remembered
        assert torch.allclose(copying(*views()), Case()(*views()), atol=1e-5)


def test_another_batch_is_refused(run):
    message = refused(run, *qkv(batch=2))

    assert "q: size 0 is 2; the package takes 1 there (it was exported fixed)" in message
    assert message.count("size 0 is 2") == 3


def test_another_key_length_is_refused(run):
    q, _, _ = qkv()
    _, k, v = qkv(length=6)

    assert "k: size 2 is 6; the package takes 4 there" in refused(run, q, k, v)


def test_another_dtype_is_refused(run):
    message = refused(run, *[each.bfloat16() for each in qkv()])

    assert "q: is bfloat16; the package takes float32 (q.to(torch.float32))" in message


def test_another_rank_is_refused(run):
    message = refused(run, *[each[0] for each in qkv()])

    assert "q: has rank 3, shape (2, 4, 8); the package takes rank 4: [1; 2; 4; 8]" in message


def test_a_gradient_is_refused_and_not_lost(run):
    q, k, v = qkv()
    q.requires_grad_()

    message = refused(run, q, k, v)
    assert "q: requires a gradient; the package takes no gradients: it computes none (call it under" in message
    with torch.no_grad():
        assert torch.allclose(run(q, k, v), Case()(q, k, v), atol=1e-5)
    refused(run, q, k, v)  # what was right under no_grad is not remembered for here
    assert run(q.detach(), k, v).requires_grad is False


# ---- others that would be wrong without a word


def test_a_tangent_is_refused_and_not_lost(run):
    q, k, v = qkv()
    run(q, k, v)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))

        assert "q: has a tangent" in refused(run, dual, k, v)
        assert torch.allclose(run(q, k, v), Case()(q, k, v), atol=1e-5)


def test_a_transform_of_torch_func_is_refused(run):
    q, k, v = qkv()

    with pytest.raises(aot.ContractError, match=r"inside a transform of torch\.func"):
        torch.func.vmap(lambda one: run(one, k, v))(q[None])


def test_a_lazily_negated_tensor_is_refused_or_resolved(static, run):
    _, k, v = qkv()
    q = torch.complex(torch.zeros(1, 2, 4, 8), torch.ones(1, 2, 4, 8)).conj().imag
    q = torch._neg_view(torch.ones(1, 2, 4, 8)) if not q.is_contiguous() else q
    assert q.is_neg()

    assert "q: is lazily negated" in refused(run, q, k, v)
    assert torch.allclose(aot.load(static, contiguous=True)(q, k, v), Case()(q, k, v), atol=1e-5)


@pytest.mark.parametrize(
    ("q", "words"),
    [
        ([[1.0]], "q: is a list; the package takes a tensor of float32"),
        (None, "q: is a NoneType"),
        (torch.zeros(1, 2, 4, 8).to_sparse(), "q: is sparse_coo; the package takes strided tensors (q.to_dense())"),
        (torch.zeros(1, 2, 4, 8, device="meta"), "q: is on meta; the package takes cpu"),
        (torch.zeros(1, 2, 4, 8).as_subclass(type("Mine", (torch.Tensor,), {})), "q: is a Mine; the package takes"),
        (torch.zeros(1, 2, 0, 8), "q: size 2 is 0; the package takes 4 there"),
    ],
    ids=["list", "none", "sparse", "meta", "subclass", "empty"],
)
def test_what_is_no_plain_tensor_of_that_place_and_size_is_refused(run, q, words):
    _, k, v = qkv()

    assert words in refused(run, q, k, v)


def test_a_parameter_is_a_plain_tensor(run):
    q, k, v = qkv()

    with torch.no_grad():
        assert torch.equal(run(nn.Parameter(q), k, v), run(q, k, v))


def test_every_problem_is_told_and_is_a_field(run):
    q, _, v = qkv()
    with pytest.raises(aot.ContractError) as caught:
        run(q.double(), torch.zeros(1, 2, 5, 8), v.int())

    error = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(error, fb.InputError)
    assert (error.argument, [each.input for each in error.problems]) == ("q", ["q", "v", "k"])
    assert str(error).startswith("package static.pt2 refuses this call:\n    q: is float64; the package takes float32")
    assert error.problems[2] == aot.Problem("k", "size 2 is 5", "4 there", "it was exported fixed")


# ---- sizes that may differ


@pytest.mark.parametrize("length", [32, 48, 64, 128])
def test_every_length_within_the_bounds_gives_what_eager_gives(encode, encoder, length):
    ids, mask = text(length=length)
    logits, states = encode(ids, mask, normalise=True)
    wanted, wanted_states = encoder(ids, mask, normalise=True)

    assert logits.dtype is torch.bfloat16
    assert torch.allclose(logits.float(), wanted.float(), atol=2e-2)
    assert list(states) == ["pooled", "hidden"]
    for name in states:
        assert torch.allclose(states[name], wanted_states[name], atol=1e-5)


@pytest.mark.parametrize(
    ("length", "words"),
    [
        (100, "nearest: 96 and 112; pad to 112 or cut to 96"),
        (16, "nearest: 32; pad to 32"),
        (8, "nearest: 32; pad to 32"),
        (1, "nearest: 32; pad to 32"),
    ],
)
def test_a_length_that_is_no_multiple_or_too_small_is_refused_with_the_nearest(encode, length, words):
    message = refused(encode, *text(length=length), normalise=True)

    assert f"ids: size 1 is {length}; the package takes " in message
    assert words in message
    assert "mask" not in message  # the same length, and the same fault


@pytest.mark.skipif(OLD, reason="torch 2.6 packages no 16 * Dim, and Dim.AUTO has no upper bound")
def test_a_length_above_the_bound_is_refused(encode):
    message = refused(encode, *text(length=144), normalise=True)

    assert "takes 32 to 128, a multiple of 16 (nearest: 128; cut to 128, or export with a larger bound)" in message


def test_lengths_that_belong_together_have_to_agree(encode):
    ids, _ = text()
    _, mask = text(length=64)

    message = refused(encode, ids, mask, normalise=True)
    assert "mask: size 1 is 64; the package takes 48, since size 1 of ids is 48" in message


@pytest.mark.parametrize("rows", [1, 3])
def test_a_batch_other_than_the_fixed_one_is_refused(encode, rows):
    message = refused(encode, *text(rows=rows), normalise=True)

    assert f"ids: size 0 is {rows}; the package takes 2 there" in message


@pytest.mark.parametrize(("place", "value"), [((1, 47), 32), ((0, 0), -1)])
def test_an_index_beyond_its_table_is_refused_and_does_not_end_the_process(encode, place, value):
    ids, mask = text()
    encode(ids, mask, normalise=True)
    ids[place] = value
    smallest, largest = int(ids.min()), int(ids.max())

    words = f"ids: has values from {smallest} to {largest}; the package takes 0 to 31 (they are indices"
    for _ in range(2):
        assert words in refused(encode, ids, mask, normalise=True)
    assert "on cpu, values 0 to 31" in str(encode.contract)


@pytest.mark.skipif(OLD, reason="torch 2.6 packages no 16 * Dim")
def test_the_contract_tells_what_the_graph_takes_and_not_what_was_asked_for(dynamic, encode):
    length = encode.contract.tensors()[0].sizes[1]

    assert (length.low, length.high, length.times, length.plus) == (32, 128, 16, 0)
    assert [each for each in dynamic.contract.notes if each.startswith("size 1 of ids")] == [
        "size 1 of ids was to be 16 to 128; the package takes 32 to 128, a multiple of 16 (torch.export sets sizes 0 "
        "and 1 apart: export them by themselves)."
    ]
    assert "ids: int64 [2; 32 to 128, a multiple of 16], contiguous, on cpu" in str(encode.contract)


def test_a_packages_report_says_which_kernels_are_in_it(encode, dynamic):
    report = encode.report()

    assert report["path"] == str(dynamic.path)
    assert report["policy"] == ("auto" if OLD else "exact")
    (answer,) = report["attention"]["tests.aot"].values()
    assert answer == ("reference" if OLD else "sdpa-cpu")


# ---- arguments


def test_arguments_go_by_position_or_by_name(run, encode):
    q, k, v = qkv()
    ids, mask = text()

    assert torch.equal(run(q, v=v, k=k), run(q, k, v))
    assert torch.equal(encode(mask=mask, ids=ids, normalise=True)[0], encode(ids, mask, normalise=True)[0])


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (2, {}, "arguments: v is missing; the package takes (q, k, v)"),
        (4, {}, "4 given by position"),
        (3, {"v": 0}, "v given twice"),
        (3, {"mask": 0}, "mask is unknown"),
    ],
)
def test_arguments_too_few_too_many_or_unknown_are_refused(run, args, kwargs, words):
    given = [*qkv(), torch.zeros(1)]

    assert words in refused(run, *given[:args], **kwargs)


@pytest.mark.parametrize("given", [False, 1, torch.tensor(True)], ids=["false", "one", "tensor"])
def test_an_argument_that_was_fixed_has_to_be_the_same(encode, given):
    assert "normalise: is " in refused(encode, *text(), normalise=given)


def test_in_a_compiled_function_a_package_breaks_the_graph_and_is_checked(run):
    compiled = torch.compile(lambda q, k, v: run(q + 1, k, v) * 2, backend="eager")
    q, k, v = qkv()

    assert torch.allclose(compiled(q, k, v), run(q + 1, k, v) * 2)
    with pytest.raises(aot.ContractError, match="q: size 2 is 5"):
        compiled(torch.zeros(1, 2, 5, 8), k, v)


# ---- the file


def test_a_package_keeps_the_callers_own_data_and_is_written_whole(static, run, folder):
    assert run.meta == static.meta == {"labels": ["a", "b"]}
    assert run.sha256 == static.sha256
    assert static.seconds["compile"] > 0
    assert sorted(each.suffix for each in folder.iterdir()) == [".pt2"] * len(list(folder.iterdir()))
    with zipfile.ZipFile(static.path) as file:
        assert [each for each in file.namelist() if each.endswith("extra/fuseboard.json")]


def test_a_package_is_itself_after_pickling(run):
    again = pickle.loads(pickle.dumps(run))

    assert torch.equal(again(*qkv()), run(*qkv()))
    assert repr(copy.deepcopy(run)) == repr(run) == "<Package static.pt2(q, k, v) on cpu>"


def test_a_package_can_be_held_to_a_digest_that_came_another_way(static, tmp_path):
    assert aot.load(static, sha256=static.sha256.upper()).sha256 == static.sha256
    with pytest.raises(aot.PackageError, match="it is another file") as error:
        aot.load(static, sha256="0" * 64)
    assert error.value.reason == "digest"


def damaged(package, tmp_path, change) -> Path:
    path = tmp_path / "damaged.pt2"
    data = bytearray(package.path.read_bytes())
    path.write_bytes(change(data))
    return path


def flipped(at):
    def change(data):
        data[at if at >= 0 else len(data) + at] ^= 1
        return data

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[: len(data) // 2], "unreadable"),
        (lambda data: data[:-1], None),
        (lambda data: b"", "unreadable"),
        (lambda data: data + b"\n", None),
        (flipped(0), None),
        (flipped(30), None),
        (flipped(70_000), None),
        (flipped(-1), "altered"),
        (flipped(-70), None),
        (flipped(-120), None),
    ],
)
def test_a_truncated_or_altered_file_is_refused(static, tmp_path, change, reason):
    with pytest.raises(aot.PackageError, match="Nothing of it was loaded") as error:
        aot.load(damaged(static, tmp_path, change))

    assert error.value.reason == reason or (reason is None and error.value.reason in ("altered", "unreadable"))


def test_a_flipped_byte_in_a_member_is_told_with_the_members_name(static, tmp_path):
    with zipfile.ZipFile(static.path) as file:
        code = next(each for each in file.infolist() if each.filename.endswith(".so"))

    path = damaged(static, tmp_path, flipped(code.header_offset + code.file_size // 2))
    with pytest.raises(aot.PackageError, match=r"was changed after it was made, in .*\.so: the digest does not fit"):
        aot.load(path)


def stack_of(library: bytes) -> int:
    """How a library says that its process uses the stack: PF_X, PF_W and PF_R of PT_GNU_STACK."""
    table, size, count = struct.unpack_from("<32xQ14xHH", library)
    headers = [struct.unpack_from("<II", library, table + i * size) for i in range(count)]
    return next(flags for kind, flags in headers if kind == 0x6474E551)


@pytest.mark.skipif(sys.platform != "linux", reason="ELF")
def test_a_package_asks_for_no_executable_stack_and_is_whole_for_others_too(static, dynamic):
    for package in (static, dynamic):
        with zipfile.ZipFile(package.path) as file:
            libraries = [each for each in file.namelist() if each.endswith(".so")]

            assert [stack_of(file.read(each)) for each in libraries] == [6] * len(libraries) != []
            assert file.testzip() is None


def edited(package, tmp_path, edit) -> Path:
    """The package with another contract, sealed again: what a digest inside a file cannot tell."""
    path = tmp_path / "edited.pt2"
    with zipfile.ZipFile(package.path) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for each in old.infolist():
            if each.filename.endswith(archive.MEMBER):
                data = json.loads(old.read(each))
            else:
                new.writestr(each, old.read(each))
    edit(data["contract"])
    archive.seal(path, data)
    return path


def test_a_file_that_is_sealed_again_is_whole(static, tmp_path):
    assert torch.equal(aot.load(edited(static, tmp_path, lambda it: None))(*qkv()), aot.load(static)(*qkv()))


@pytest.mark.parametrize(
    ("edit", "reason", "words"),
    [
        (lambda it: it.update(torch="2.5.0"), "torch", r"made by torch 2\.5\.0, and this is .*: export it anew"),
        (lambda it: it.update(schema=99), "schema", r"schema 99, and this fuseboard reads 1"),
        (lambda it: it.pop("inputs"), "schema", r"its contract is of another kind"),
        (lambda it: it["target"].update(machine="riscv64"), "cpu", r"made for \w+ on riscv64, and this is"),
        (
            lambda it: it["target"].update(instructions=["avx1024"]),
            "cpu",
            r"a CPU with avx1024, which this one has not",
        ),
        (
            lambda it: it["target"].update(device="cuda", gpu="NVIDIA H200", capability=[9, 0], cuda="13.0"),
            "device",
            r"made for NVIDIA H200, and torch sees no GPU here",
        ),
    ],
    ids=["torch", "schema", "inputs", "machine", "instructions", "gpu"],
)
def test_a_package_for_another_torch_or_machine_is_refused_by_name(static, tmp_path, edit, reason, words):
    if reason == "device" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(aot.PackageError, match=words) as error:
        aot.load(edited(static, tmp_path, edit))

    assert error.value.reason == reason
    assert pickle.loads(pickle.dumps(error.value)).path == str(tmp_path / "edited.pt2")


def test_a_package_is_not_loaded_onto_another_kind_of_device(static):
    with pytest.raises(
        aot.PackageError, match="it was made for cpu, and cannot run on cuda:0: export it there, or load"
    ):
        aot.load(static, device="cuda:0")


# ---- a fresh process: no compiler, nothing compiled, nothing left, no signal

CHILD = """
import json, os, sys
sys.path.insert(0, os.environ["HERE"])
import torch
from fuseboard.engine import aot

def stack():
    with open("/proc/self/maps") as maps:
        return [line.split()[1] for line in maps if line.rstrip().endswith("[stack]")]

given, before = torch.load("given.pt"), stack()
static, dynamic = aot.load("static.pt2"), aot.load("dynamic.pt2")
same = torch.allclose(static(*given["qkv"]), given["static"], atol=1e-5)
logits, states = dynamic(*given["text"], normalise=True)
same = same and torch.allclose(states["pooled"], given["pooled"], atol=1e-5)
answers = []
for name, arguments in given["wrong"]:
    run, kwargs = (static, {}) if name == "static" else (dynamic, {"normalise": True})
    try:
        run(*arguments, **kwargs)
        answers.append("answered")
    except Exception as error:
        answers.append(type(error).__name__)
compilers = [each for each in ("torch._inductor.codecache", "torch._dynamo") if each in sys.modules]
unchanged = stack() == before
del static, dynamic, run
print(json.dumps({"same": same, "answers": answers, "compilers": compilers, "stack unchanged": unchanged}))
"""


def test_a_fresh_process_without_a_compiler_loads_runs_and_refuses(static, dynamic, encoder, tmp_path):
    for each in (static, dynamic):
        shutil.copy(each.path, tmp_path)
    q, _, _ = qkv()
    _, k6, v6 = qkv(length=6)
    requires = [each.requires_grad_() for each in qkv()]
    wrong = [("static", each) for each in (transposed(), sliced(), qkv(batch=2), (q, k6, v6), requires)]
    wrong += [("static", [each.bfloat16() for each in qkv()]), ("static", [each[0] for each in qkv()])]
    wrong += [("static", [q.to("meta")] * 3), ("static", [q, q])]
    wrong += [("dynamic", text(rows, length)) for rows, length in ((2, 100), (1, 48), (2, 8), (2, 16), (3, 48), (2, 0))]
    wrong += [("dynamic", [torch.full((2, 48), 10**9), text()[1]])]
    wrong += [("dynamic", [each.T.contiguous().T for each in text()]), ("dynamic", [text()[0].int(), text()[1]])]
    given = {
        "qkv": qkv(), "static": Case()(*qkv()), "text": text(), "wrong": wrong,
        "pooled": encoder(*text(), normalise=True)[1]["pooled"].detach(),
    }  # fmt: skip
    torch.save(given, tmp_path / "given.pt")
    places = {name: tmp_path / name for name in ("cache", "temp")}
    for each in places.values():
        each.mkdir()

    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
        env={
            "PATH": "", "HERE": str(Path(fb.__file__).parents[1]), "TMPDIR": str(places["temp"]),
            "TORCHINDUCTOR_CACHE_DIR": str(places["cache"]), "OMP_NUM_THREADS": "1",
        },
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    refused = ["ContractError"] * len(wrong)
    assert answer == {"same": True, "answers": refused, "compilers": [], "stack unchanged": True}
    assert list(places["cache"].iterdir()) == []
    assert list(places["temp"].iterdir()) == []


# ---- inputs that are one tensor, or that the model writes into


class Adds(nn.Module):
    def forward(self, total, x):
        total.add_(1)
        return total * 2 + x


@pytest.fixture(scope="module")
def adds(folder):
    same = torch.randn(3, 4)
    return aot.load(aot.export(Adds(), (same, same), folder / "adds.pt2"))


def test_an_example_that_is_one_tensor_twice_makes_two_inputs(adds):
    total = torch.zeros(3, 4)

    assert torch.equal(adds(total, torch.full((3, 4), 5.0)), torch.full((3, 4), 7.0))
    assert torch.equal(total, torch.ones(3, 4))


def test_a_backward_through_a_value_that_a_package_has_written_over_is_an_error(adds):
    total, weight = torch.ones(3, 4), torch.ones(3, 4, requires_grad=True)
    loss = (weight * total).sum()
    with torch.no_grad():
        adds(total, torch.zeros(3, 4))

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- exports that are refused, none of which compiles


def exported(tmp_path, model, inputs, **options):
    return aot.export(model, inputs, tmp_path / "x.pt2", **options)


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Gives(nn.Module):
    def forward(self, x):
        return x + 1, None


def test_export_under_autocast_is_refused_with_the_reason(tmp_path):
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(
            aot.ExportError, match=r"called under autocast, and a package would not be.*bfloat16"
        ) as error:
            exported(tmp_path, nn.Linear(2, 2), (torch.ones(1, 2),))
    assert error.value.reason == "autocast"


EXPORTS = """
import os, sys
sys.path.insert(0, os.environ["HERE"])
import torch
from fuseboard.engine import aot

try:
    aot.export(torch.nn.Identity(), (torch.ones(2),), "x.pt2")
except aot.ExportError as error:
    print(error.reason, error)
"""


def test_export_without_a_compiler_says_so_at_once(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", EXPORTS],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
        env={"PATH": "", "HERE": str(Path(fb.__file__).parents[1])},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("compiler there is no C++ compiler, which a package is made with: install g++")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("g++"), reason="g++ on Linux")
def test_a_compiler_that_brings_a_c_library_of_its_own_is_refused_at_once(tmp_path):
    """Its packages cannot be loaded, or end the process that does, in torch's own loader."""
    compiler = tmp_path / "static-g++"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} -static-libstdc++ "$@"\n')
    compiler.chmod(0o755)
    place = tmp_path / "place"
    place.mkdir()

    done = subprocess.run(
        [sys.executable, "-c", EXPORTS],
        cwd=place, capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "CXX": str(compiler), "HERE": str(Path(fb.__file__).parents[1])},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"compiler the C++ compiler {compiler} puts a C++ library of its own into what")
    assert "CXX=/usr/bin/g++" in done.stdout
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("model", "x", "reason", "words"),
    [
        (Writes(), torch.ones(2), "state", r"writes into its buffers calls"),
        (Gives(), torch.ones(2), "output", r"output 1 of the model is no tensor but None"),
        (nn.Identity(), torch.ones(1).expand(4), "input", r"is expanded \(strides \(0,\)\)"),
        (nn.Identity(), torch.ones(4).to_sparse(), "input", r"is torch\.sparse_coo"),
        (nn.Identity(), torch.ones(4, device="meta"), "device", r"are on meta; a package runs on the CPU"),
    ],
    ids=["state", "output", "expanded", "sparse", "device"],
)
def test_a_model_of_which_no_package_keeps_its_promise_is_refused(tmp_path, model, x, reason, words):
    with pytest.raises(aot.ExportError, match=words) as error:
        exported(tmp_path, model, (x,))

    assert error.value.reason == reason
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": len}, "model is a builtin_function_or_method; expected an nn.Module"),
        ({"inputs": torch.ones(2)}, "inputs is a Tensor; expected a tuple"),
        ({"meta": {1, 2}}, "set is not JSON serializable"),
        ({"path": "x.so"}, "expected a name that ends in .pt2"),
        ({"inputs": {"x": 1}, "kwargs": {"x": 2}}, "x: given in inputs and in kwargs"),
    ],
)
def test_arguments_of_export_that_cannot_be_right_are_refused(change, words):
    arguments = {"model": nn.Identity(), "inputs": (torch.ones(2),), "path": "x.pt2"} | change

    with pytest.raises((TypeError, ValueError), match=words):
        aot.export(arguments.pop("model"), arguments.pop("inputs"), arguments.pop("path"), **arguments)


def test_a_compilation_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "x.pt2"
    path.write_bytes(b"before")
    with pytest.raises(Exception, match="no_such_option"):
        aot.export(nn.Identity(), (torch.ones(2),), path, inductor_configs={"no_such_option": 1})

    assert path.read_bytes() == b"before"
    assert [each.name for each in tmp_path.iterdir()] == ["x.pt2"]


# ---- attention in the trace


@contextlib.contextmanager
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def traced(policy, dynamic_shapes=None, example=None):
    model, inputs = Case(), example or tuple(qkv(length=6))
    with torch.no_grad(), quiet(), attention_in_trace(model, inputs, {}, policy_for(policy)) as answers:
        program = torch.export.export(model, inputs, dynamic_shapes=dynamic_shapes, strict=False)
    return answers, program.graph_module.code


def test_the_policys_kernel_is_in_the_graph():
    answers, code = traced("sdpa-math")
    assert list(answers["tests.aot"].values()) == ["sdpa-math"]
    assert "aten.scaled_dot_product_attention" not in code
    assert "_scaled_dot_product_attention_math" in code or "softmax" in code

    answers, code = traced("auto")
    assert answers == {"tests.aot": {"every call": "reference"}}
    assert "aten.scaled_dot_product_attention" in code


def test_lengths_that_torchs_operator_forgets_to_compare_are_conditions():
    auto, inputs = torch.export.Dim.AUTO, tuple(qkv(length=6))
    with torch.no_grad(), quiet():
        program = torch.export.export(Case(), inputs, dynamic_shapes=[{2: auto}] * 3, strict=False)
    values = [each.meta["val"] for each in program.graph.nodes if each.op == "placeholder"]
    sizes = GraphSizes(values)
    _, k, v = (sizes.text(each.shape[2]) for each in values)

    assert set(attention_guards(program, sizes)) <= {f"({k}) == ({v})"}
    assert k == v or list(attention_guards(program, sizes)) == [f"({k}) == ({v})"]


class Looks(nn.Module):
    def forward(self, values, rows, places):
        return torch.zeros(3, 7).scatter_reduce(1, rows, values, "sum"), values.take(places)


def test_whatever_an_input_indexes_limits_its_values():
    inputs = torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    with torch.no_grad(), quiet():
        program = torch.export.export(Looks(), inputs, strict=False)
    sizes = GraphSizes(each.meta["val"] for each in program.graph.nodes if each.op == "placeholder")

    assert value_limits(program, sizes) == {"rows": ((0, 6),), "places": ((-6, 5),)}


@pytest.mark.parametrize("given", [torch.randn(4, 3).T, torch.randn(5, 4)[1:4, :3], torch.randn(9).unfold(0, 3, 2)])
def test_an_example_is_copied_as_it_lies(given):
    copied = _alone(given)

    assert torch.equal(copied, given)
    assert copied.stride() == given.stride()
    assert copied.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()


def test_what_is_bound_around_an_export_does_not_count():
    with fb.bind("sdpa-math"):
        answers, code = traced("auto")

    assert answers == {"tests.aot": {"every call": "reference"}}
    assert "aten.scaled_dot_product_attention" in code


def test_a_trace_leaves_nothing_at_a_site():
    before = dict(SITE.tables)
    traced("sdpa-math", {name: {2: torch.export.Dim.AUTO} for name in "qkv"})
    gc.collect()

    assert dict(SITE.tables) == before


class Branches(nn.Module):
    def forward(self, x):
        if torch.compiler.is_exporting() if hasattr(torch.compiler, "is_exporting") else torch.compiler.is_compiling():
            return fb.attention(x, x, x, site=SITE, causal=True)
        return fb.attention(x, x, x, site=SITE)


def test_a_call_that_only_the_trace_makes_is_refused():
    model, (x, _, _) = Branches(), qkv()
    with torch.no_grad(), attention_in_trace(model, (x,), {}, policy_for("exact")):
        with pytest.raises(NotFrozenError, match="was not called so by the example"):
            with quiet():
                torch.export.export(model, (x,), strict=False)
