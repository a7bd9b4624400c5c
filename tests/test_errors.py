"""Errors as a pool of processes hands them on."""

import copy
import pickle

import pytest

from runtime.errors import BundleError, DeviceError, LogitsError, PromptError, SamplingError, SpecError, first_line

ERRORS = [BundleError("a"), DeviceError("b"), LogitsError("c"), PromptError("d"), SamplingError("e", 3)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_come_back_from_another_process(error: SpecError) -> None:
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301 - written here
        assert (type(same), str(same), vars(same)) == (type(error), str(error), vars(error))


def test_every_error_is_tried() -> None:
    assert {type(error) for error in ERRORS} == set(SpecError.__subclasses__())


HELPER = "/onnxruntime_src/onnxruntime/core/providers/cpu/tensor/reshape_helper.h:91 "
SIGNATURE = "onnxruntime::ReshapeHelper::ReshapeHelper(const onnxruntime::TensorShape&, onnxruntime::TensorShapeVector&, bool) "


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("[ONNXRuntimeError] : 7 : INVALID_PROTOBUF : Protobuf parsing failed.\nmore", "Protobuf parsing failed."),
        (f"[ONNXRuntimeError] : 1 : FAIL : in node 'a': {HELPER}{SIGNATURE}size was false.", "in node 'a': size was false."),
        (f"{HELPER}void f::g(const map<basic_string<char>, int>&) Opset 99 (new).", "Opset 99 (new)."),
        ("matmul_helper.h:59 Compute MatMul (2 by 3)", "Compute MatMul (2 by 3)"),
        (f"{'word ' * 60}", f"{'word ' * 47}word…"),
        ("x" * 999, f"{'x' * 240}…"),
        ("", "RuntimeError"),
    ],
)
def test_words_of_other_libraries_are_cut_for_a_sentence(said: str, kept: str) -> None:
    assert first_line(RuntimeError(said)) == kept
