"""Which form each device takes, of those a bundle may have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.contract import DecoderSpec, FileRecord
from runtime.device_forms import cuda_form, form_on, runs_on_cuda


def decoder(*forms: tuple[str, str]) -> DecoderSpec:
    """A decoder of (lowering, cache_dtype) forms."""
    made = [
        DecoderSpec(
            source="made",
            architecture="llama",
            graph=(FileRecord(f"target/{lowering}.onnx", 1, "0" * 64),),
            lowering=lowering,
            precision="int4",
            num_layers=1,
            num_key_value_heads=1,
            head_size=8,
            vocab_size=9,
            context_length=64,
            cache_dtype=cache_dtype,
            spare_slots=1,
            min_rows=1,
        )
        for lowering, cache_dtype in forms
    ]
    return replace(made[0], other_forms=tuple(made[1:]))


@pytest.mark.parametrize(
    ("forms", "taken"),
    [
        ([("gqa", "float16")], "gqa"),
        ([("gqa", "bfloat16"), ("static", "bfloat16")], "gqa"),
        ([("gqa", "float32"), ("gqa-half", "float16"), ("static", "float16")], "gqa-half"),
        ([("gqa", "float32"), ("static", "float16"), ("primitive", "float16")], "static"),
        ([("gqa", "float32"), ("primitive", "float32")], "primitive"),
    ],
)
def test_cuda_takes_the_best_form_that_has_kernels_there(forms: list[tuple[str, str]], taken: str) -> None:
    form = cuda_form(decoder(*forms))
    assert (form.lowering, form.other_forms) == (taken, ())
    assert runs_on_cuda(form)


@pytest.mark.parametrize("form", [("gqa", "float32"), ("growing", "float32"), ("growing", "float16")])
def test_what_cuda_cannot_run_stays_for_the_backend_to_refuse(form: tuple[str, str]) -> None:
    taken = cuda_form(decoder(form))
    assert (taken.lowering, taken.cache_dtype) == form
    assert not runs_on_cuda(taken)


@pytest.mark.parametrize(
    ("device", "taken"),
    [("cpu", "gqa"), ("cuda", "gqa-half"), ("cuda:1", "gqa-half"), ("tensorrt", "static"), ("ort-tensorrt:1", "primitive")],
)
def test_each_device_has_a_form_of_its_own(device: str, taken: str) -> None:
    forms = [("gqa", "float32"), ("gqa-half", "float16"), ("static", "float16"), ("primitive", "float16")]
    assert form_on(decoder(*forms), device).lowering == taken
