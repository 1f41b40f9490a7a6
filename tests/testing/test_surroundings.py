"""The checks that make a call otherwise: each catches its liar, for its own reason, and nobody else."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import attrs
import pytest
import torch

import fuseboard as fb
from fuseboard.testing import doubles, matrix
from fuseboard.testing.cases import Case, cases, few
from fuseboard.testing.dropout import dropout_problem
from fuseboard.testing.judge import Kit
from fuseboard.testing.process import switches
from fuseboard.testing.surroundings import CHECKS, UNASKED, captured, judge

spec = importlib.util.spec_from_file_location("fuseboard_tests_tape", Path(__file__).with_name("tape.py"))
assert spec is not None
assert spec.loader is not None
tape = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tape)
Tape = tape.Tape

REASONS = {
    "drifts": ("repeated", "wrong", "repeated"),
    "remembers_outputs": ("overwritten", "dropped argument", "q and k and v"),
    "remembers_keys": ("overwritten", "dropped argument", "mask_info.keys"),
    "keeps_inference_tensors": ("inferred", "raised", "after inference mode"),
    "differentiates_leaves_only": ("autocast", "raised", "autocast"),
    "fails_when_recomputed": ("recomputed", "raised", "recomputed"),
    "saves_otherwise_when_recomputed": ("recomputed", "raised", "recomputed"),
    "fails_behind_a_compiler": ("compiled", "raised", "torch.compile"),
    "reads_padding": ("unread", "wrong", "padding read"),
}


def outcomes(double, check):
    with doubles.registered(double):
        kit = Kit.open(double.name, "cpu")
        return [judge(kit, check, case) for case in check.cases(kit)]


@pytest.mark.parametrize("liar", REASONS)
def test_each_liar_is_caught_for_its_own_reason(liar):
    name, word, about = REASONS[liar]
    failed = [each for each in outcomes(getattr(doubles.liars, liar), CHECKS[name]) if each.failed]
    assert failed
    ((commonest, _),) = Counter((each.word, each.about) for each in failed).most_common(1)
    assert commonest == (word, about), failed[0]


def test_a_call_that_is_off_once_overwritten_is_told_with_the_tolerance():
    seen = set()

    def kernel(q, k, v, **given):
        again = q.data_ptr() in seen
        seen.add(q.data_ptr())
        return doubles.fake_backend("x").kernel()(q, k, v, **given) + 0.01 * again

    with doubles.registered(doubles.fake_backend("tires", kernel)):
        kit = Kit.open("tires", "cpu")
        kit.verdict()  # whose own tensors may have lain where the case's lie
        seen.clear()
        outcome = judge(kit, CHECKS["overwritten"], Case(torch.float32, 33, 65, 32, 32))
    assert str(outcome) == "wrong (overwritten): its output is off by 0.01, tolerance 0.0001"


def test_a_kernel_that_is_wrong_anyhow_is_not_asked_about_overwriting():
    found = outcomes(doubles.liars.off_by_a_hundredth, CHECKS["overwritten"])
    assert {str(each) for each in found} == {f"refused ({UNASKED}): it is wrong before anything is overwritten"}


def attend(q, k, v, **given):
    return doubles.fake_backend("x").kernel()(q, k, v, **given)


def said_of(kernel, name, **more):
    """What a check says of a kernel at its plain case; the kernel is called plainly before, as by the kit."""
    case = Case(torch.float32, 33, 65, 32, 32, **more)
    with doubles.registered(doubles.fake_backend("it", kernel)):
        kit = Kit.open("it", "cpu")
        assert kit.judge(case).word == "ok"
        return str(judge(kit, CHECKS[name], case))


def test_an_output_in_a_buffer_that_the_next_call_fills_anew_is_caught():
    buffers = {}

    def kernel(q, k, v, **given):
        out = attend(q, k, v, **given)
        key = (out.shape, torch.is_inference_mode_enabled())
        return buffers.setdefault(key, torch.empty_like(out)).copy_(out)

    assert said_of(kernel, "repeated") == "wrong (repeated): it returned memory that an earlier output still uses"


def test_a_gradient_in_a_buffer_that_the_next_call_fills_anew_is_caught():
    buffers = {}

    class Buffered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q):
            return q.clone()

        @staticmethod
        def backward(ctx, grad):
            return buffers.setdefault(grad.shape, torch.empty_like(grad)).copy_(grad)

    found = said_of(lambda q, k, v, **given: attend(Buffered.apply(q), k, v, **given), "repeated", grad="qkv")
    assert found == "wrong (repeated): it returned memory that an earlier gradient of q still uses"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: torch.manual_seed(0), "the default generator of cpu"),
        (lambda: torch.rand(1), "the default generator of cpu"),
        (
            lambda: torch.set_float32_matmul_precision("medium"),
            "float32 matmul precision (highest to medium) and allow_tf32 of matmul (False to True)",
        ),
        (lambda: torch.use_deterministic_algorithms(True), "deterministic algorithms (0 to 2)"),
        (lambda: torch.set_default_dtype(torch.float64), "default dtype (torch.float32 to torch.float64)"),
        (lambda: torch.set_grad_enabled(True), "grad mode (False to True)"),
        (lambda: setattr(torch.backends.cudnn, "allow_tf32", False), "allow_tf32 of cudnn (True to False)"),
        (lambda: setattr(torch.backends.cudnn, "benchmark", True), "cudnn.benchmark (False to True)"),
        (lambda: torch.backends.cuda.enable_flash_sdp(False), "flash sdp (True to False)"),
        (lambda: torch.set_num_threads(3), "number of threads (1 to 3)"),
    ],
)
def test_what_a_call_changes_in_the_process_is_named_and_put_back(change, said):
    def kernel(q, k, v, **given):
        out = attend(q, k, v, **given)
        change()
        return out

    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.set_num_threads(1)
        try:
            before = switches()
            assert said_of(kernel, "process") == f"wrong (process state): it changed {said}"
            assert switches() == before
        finally:
            torch.set_num_threads(threads)


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch has no newer switches")
def test_a_switch_that_torch_refuses_to_tell_is_named_and_put_back():
    def kernel(q, k, v, **given):
        out = attend(q, k, v, **given)
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        return out

    before = switches()
    try:
        found = said_of(kernel, "process")
        assert "allow_tf32 of matmul (False to a mix of torch's old and new switches)" in found
        assert switches() == before
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"


def test_what_a_backward_changes_in_the_process_is_named_and_the_random_numbers_go_on():
    def kernel(q, k, v, **given):
        out = attend(q, k, v, **given)
        if out.requires_grad:
            out.register_hook(lambda grad: torch.manual_seed(0) and None)
        return out

    with doubles.registered(doubles.fake_backend("it", kernel)):
        kit = Kit.open("it", "cpu")
        kit.verdict()
        before = torch.get_rng_state()
        found = judge(kit, CHECKS["process"], Case(torch.float32, 33, 65, 32, 32, grad="qkv"))
    assert str(found) == "wrong (process state): its backward changed the default generator of cpu"
    assert torch.equal(torch.get_rng_state(), before)


def test_a_kernel_of_the_least_claims_is_compiled_too():
    least = dict.fromkeys(("gqa", "mask_grad", "custom_scale", "negative_scale", "backward", "empty"), False)
    double = doubles.fake_backend("least", dtypes={torch.float32}, masks=(), structures=(), causal=(), **least)
    assert Counter(each.word for each in outcomes(double, CHECKS["compiled"])) == {"ok": 1, "refused": 5}


@pytest.mark.parametrize("liar", sorted(REASONS.keys() - {"drifts", "remembers_outputs"}))
def test_such_a_liar_is_right_when_its_calls_are_made_plainly(liar):
    with doubles.registered(getattr(doubles.liars, liar)):
        kit = Kit.open(getattr(doubles.liars, liar).name, "cpu")
        assert [
            str(case) for case in few(kit.backend.constraints, kit.device) if kit.judge(case, kit.attention).failed
        ] == []


@pytest.mark.parametrize("name", [name for name, check in CHECKS.items() if name not in ("captured", "elsewhere")])
def test_the_reference_as_a_backend_passes(name):
    words = Counter(str(each) for each in outcomes(doubles.loopback, CHECKS[name]))
    assert set(words) == {"ok"}


# ---- captured, on a tape where there is no CUDA


def on_tape(double, wants=lambda _case: True):
    with doubles.registered(double):
        kit = Kit.open(double.name, "cpu")
        chosen = [case for case in few(kit.backend.constraints, kit.device) if wants(case)]
        return [judge(kit, attrs.evolve(CHECKS["captured"], run=lambda kit, case: captured(kit, case, Tape)), case)
                for case in chosen]  # fmt: skip


def test_the_reference_can_be_captured_forward_and_backward():
    assert {str(each) for each in on_tape(doubles.loopback)} == {"ok"}


def test_a_kernel_that_waits_for_the_device_cannot_be_captured():
    found = on_tape(doubles.liars.asks_for_lengths, lambda case: "right-keys" in str(case))
    assert {(each.word, each.about) for each in found} == {("raised", "captured")}
    assert "operation not permitted when stream is capturing" in found[0].detail


def test_a_replay_that_keeps_old_lengths_names_the_keys():
    found = on_tape(doubles.liars.remembers_keys, lambda case: "right-keys" in str(case) and not case.grad)
    assert {(each.word, each.about) for each in found} == {("dropped argument", "mask_info.keys")}


def test_a_kernel_that_declines_captures_is_refused_and_answers_again_afterwards():
    def kernel(q, k, v, **given):
        if Tape.capturing is not None:
            msg = "it waits for the device, which a capture forbids"
            raise fb.DeclinedError(msg)
        return doubles.loopback.kernel()(q, k, v, **given)

    found = on_tape(doubles.fake_backend("declining", kernel, dtypes={torch.float32}))
    assert {(each.word, each.about) for each in found} == {("refused", "declined")}
    assert str(found[0]) == "refused (declined): it waits for the device, which a capture forbids"


def test_a_failed_capture_that_costs_the_device_ends_the_kit():
    broken = []

    def kernel(q, k, v, **given):
        if Tape.capturing is not None:
            broken.append(1)
        if broken:
            msg = "the context is gone"
            raise RuntimeError(msg)
        return doubles.loopback.kernel()(q, k, v, **given)

    first, *others = on_tape(doubles.fake_backend("poisoning", kernel, dtypes={torch.float32}))
    assert "after a capture that failed, the same call" in str(first)
    assert {(each.word, each.about) for each in others} == {("raised", "device lost")}


def test_off_cuda_a_capture_is_skipped_with_its_reason():
    with doubles.registered(doubles.loopback):
        kit = Kit.open("loopback", "cpu")
        assert CHECKS["captured"].lacks(kit) == "cpu has no CUDA graphs"
        assert CHECKS["elsewhere"].lacks(kit) == "cpu has no current device"


@pytest.mark.gpu
def test_on_cuda_the_reference_is_captured_and_follows_its_inputs():
    with doubles.registered(doubles.loopback):
        kit = Kit.open("loopback", "cuda:0")
        words = {str(judge(kit, CHECKS["captured"], case)) for case in few(kit.backend.constraints, kit.device)}
    assert words == {"ok"}


@pytest.mark.gpu
def test_on_cuda_a_kernel_that_waits_is_caught_and_the_device_lives_on():
    with doubles.registered(doubles.liars.asks_for_lengths):
        kit = Kit.open("asks-for-lengths", "cuda:0")
        chosen = [case for case in few(kit.backend.constraints, kit.device) if "right-keys" in str(case)]
        found = [judge(kit, CHECKS["captured"], case) for case in chosen]
        assert {(each.word, each.about) for each in found} == {("raised", "captured")}
        assert not kit.lost
        assert kit.judge(chosen[0]).word == "ok"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_kernel_that_works_on_the_current_device_only_is_caught_when_that_is_another():
    with doubles.registered(doubles.liars.allocates_on_the_current_device, doubles.loopback):
        for name, want in (
            ("allocates-on-the-current-device", ("raised", "another device current")),
            ("loopback", ("ok", "")),
        ):
            kit = Kit.open(name, "cuda:0")
            found = [judge(kit, CHECKS["elsewhere"], case) for case in few(kit.backend.constraints, kit.device)]
            assert {(each.word, each.about) for each in found} == {want}


# ---- what the checks leave behind, and what is written of them


def test_a_call_that_broke_in_one_check_is_tried_again_in_the_next():
    with doubles.registered(doubles.liars.fails_when_recomputed):
        kit = Kit.open("fails-when-recomputed", "cpu")
        (case,) = [
            case for case in few(kit.backend.constraints, kit.device) if str(case) == "float32-33x65-d32-grad.qkv"
        ]
        assert judge(kit, CHECKS["recomputed"], case).failed
        assert str(judge(kit, CHECKS["repeated"], case)) == "ok"
        assert kit.policy.registry.broken == {}


def test_the_calls_of_the_checks_are_cases_too():
    made = {str(case) for case in cases(doubles.EVERYTHING, torch.device("cpu"))}
    assert {str(case) for case in few(doubles.EVERYTHING, torch.device("cpu"))} <= made


@pytest.mark.parametrize(
    ("limits", "lengths"),
    [
        ({}, (33, 65)),
        ({"lengths": {"equal"}}, (33, 33)),
        ({"guards": [fb.Guard("tiles", lambda _call, sizes: sizes.k_length % 128 == 0, "whole tiles")]}, (128, 256)),
    ],
)
def test_the_calls_of_the_checks_are_at_lengths_that_the_backend_takes(limits, lengths):
    with doubles.registered(doubles.fake_backend("narrow", **limits)):
        kit = Kit.open("narrow", "cpu")
        plain = few(kit.backend.constraints, kit.device)[0]
        assert (plain.q_length, plain.k_length) == lengths
        assert {str(judge(kit, CHECKS[name], plain)) for name in ("repeated", "inferred", "compiled")} == {"ok"}


def test_other_values_come_in_the_same_shapes():
    case = Case(torch.float32, 5, 7, 8, 8, structure=("left", False, None))
    one, other = case.inputs(torch.device("cpu")), case.inputs(torch.device("cpu"), 1)
    assert one.q.shape == other.q.shape
    assert not torch.equal(one.q, other.q)
    assert one.info is not None
    assert other.info is not None
    assert not torch.equal(one.info.keys, other.info.keys)


def test_the_matrix_has_a_line_for_each_way():
    records = [{"backend": "b", "check": "CUDA graph", "word": word} for word in ("ok", "ok", "refused")]
    records += [{"backend": "b", "check": "checkpoint", "word": "raised"}]
    records += [{"backend": "b", "check": "autocast", "word": "refused"}]
    text = matrix.render("b", "1", "cpu", [], records)
    assert "0 cases, 0 ok, 0 refused, 1 failed (1 of them when made otherwise).\n" in text
    assert "\n* CUDA graph: yes (2 cases, 1 refused)\n" in text
    assert "\n* checkpoint: FAILS (1 failed)\n" in text
    assert "\n* autocast: no (1 refused)\n" in text


def test_failures_are_summed_up_by_kind_the_commonest_first():
    wrong = {"word": "wrong", "about": "", "case": "b", "detail": "its output is off by 0.31, tolerance 1e-4"}
    records = [{**wrong, "case": "a"}, {**wrong, "detail": "its output is off by 2e+3, tolerance 1e-4"}]
    records += [{"word": "raised", "about": "captured", "case": "c", "detail": "RuntimeError: no"}]
    records += [{"word": "refused", "about": "gqa", "case": "d", "detail": ""}]
    assert matrix.failures(records) == [
        "    2 x wrong: its output is off by …, tolerance …, as in a: its output is off by 0.31, tolerance 1e-4",
        "    1 x raised (captured): RuntimeError: no, as in c",
    ]


def test_a_kind_of_failure_keeps_the_digits_of_names():
    detail = "it returned torch.bfloat16 (2, 33) on cuda:0, expected torch.float8_e4m3fn (2, 65) on cuda:0; at 33x65"
    (line,) = matrix.failures([{"word": "wrong", "about": "", "case": "a", "detail": detail}])
    assert line == (
        "    1 x wrong: it returned torch.bfloat16 (…, …) on cuda:…, expected torch.float8_e4m3fn (…, …) on cuda:…; "
        f"at …x…, as in a: {detail}"
    )


# ---- dropout


def dropping(generator):
    def kernel(q, k, v, *, scale, dropout_p, **given):
        weights = (q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)).softmax(-1)
        keep = (torch.rand(weights.shape, generator=generator) >= dropout_p).to(weights.dtype) / (1 - dropout_p)
        return (weights * keep) @ v

    limits = {"dropout": True, "masks": (), "structures": (), "causal": (), "gqa": False, "mask_grad": False}
    return doubles.fake_backend("dropping", kernel, dtypes={torch.float32}, **limits)


@pytest.mark.parametrize(
    ("generator", "problem"),
    [(None, "None"), (torch.Generator().manual_seed(3), "its recomputed forward drops other weights than its forward")],
)
def test_a_recomputed_forward_must_drop_what_the_first_one_did(generator, problem):
    with torch.random.fork_rng(devices=[]), doubles.registered(dropping(generator)):
        torch.manual_seed(5)
        kit = Kit.open("dropping", "cpu")
        assert dropout_problem(kit, torch.float32) is None
        assert problem in str(dropout_problem(kit, torch.float32, recomputed=True))
