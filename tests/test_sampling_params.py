"""What a caller may ask for: ranges, copies, and the sentence that refuses the rest."""

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest

from runtime.sampling_params import ACCEPTANCE_RULES, MAX_LOGPROBS, SamplingParams, TokenBias

NOT_NUMBERS = [None, "1", True, [1.0], float("nan"), float("inf"), -float("inf")]
WRONG = {
    "max_new_tokens": [0, -1, 1.0, *NOT_NUMBERS],
    "min_new_tokens": [-1, 1.0, *NOT_NUMBERS],
    "top_k": [-1, 2.0, *NOT_NUMBERS],
    "no_repeat_ngram_size": [-1, 2.0, *NOT_NUMBERS],
    "seed": [np.timedelta64(3), -1, 0.0, *NOT_NUMBERS[1:]],
    "logprobs": [-1, MAX_LOGPROBS + 1, 1.0, np.timedelta64(3), *NOT_NUMBERS[1:]],
    "temperature": [10**400, np.timedelta64(3), -0.1, -1, *NOT_NUMBERS],
    "top_p": [0, 0.0, -0.5, 1.0001, 2, *NOT_NUMBERS],
    "typical_p": [0, 0.0, -0.5, 1.0001, 2, *NOT_NUMBERS],
    "min_p": [-0.1, 1.1, *NOT_NUMBERS],
    "repetition_penalty": [0, 0.0, -1.2, *NOT_NUMBERS],
    "presence_penalty": [-2.1, 2.1, *NOT_NUMBERS],
    "frequency_penalty": [-2.1, 2.1, *NOT_NUMBERS],
    "logit_bias": [None, [1, 2], "1", 5],
    "bad_words": ["word", b"word", [""], [[]], ["a", ()], None, 5, ["a\udfff"]],
    "acceptance": ["", "Rejection", "greedy", None, 1, ["coupled"]],
    "stop": ["", [""], ["a", ""], [1], ["a", None], [b"a"], None, 5, "a\ufffd", ["a", "\ud800"]],
    "stop_token_ids": ["12", b"12", [-1], [1.0], [True], ["1"], None, 5, [np.timedelta64(3)]],
    "include_stop": ["no", None, 2],
    "ignore_eos": ["no", None, 2],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_outside_its_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is .*(expected|cannot)"):
        SamplingParams(**{name: value})


def test_every_field_has_values_that_are_refused() -> None:
    assert WRONG.keys() == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("key", [-1, 1.0, "1", None, True])
def test_a_bias_for_what_is_no_token_is_refused(key: object) -> None:
    with pytest.raises(ValueError, match=r"^logit_bias has the key .*token ids are expected"):
        SamplingParams(logit_bias={3: 1.0, key: 1.0})


@pytest.mark.parametrize("value", [*NOT_NUMBERS, 10**400])
def test_a_bias_that_is_no_finite_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^logit_bias\[3\] is .*a finite number is expected"):
        SamplingParams(logit_bias={3: value})


@pytest.mark.parametrize("word", [[-1], [1.0], [True], 5, b"ab"])
def test_a_bad_word_that_is_neither_text_nor_ids_is_refused(word: object) -> None:
    with pytest.raises(ValueError, match=r"^An entry of bad_words is .*token ids is expected"):
        SamplingParams(bad_words=["fine", word])


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^min_new_tokens is 4, more than max_new_tokens, which is 3\.$"):
        SamplingParams(max_new_tokens=3, min_new_tokens=4)
    assert SamplingParams(max_new_tokens=3, min_new_tokens=3).min_new_tokens == 3


def test_a_long_value_is_not_quoted_whole() -> None:
    with pytest.raises(ValueError, match=r"^stop is ") as refused:
        SamplingParams(stop=[1] * 10_000)
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens": 1, "top_k": 0, "top_p": 1, "min_p": 0, "temperature": 0, "repetition_penalty": 1, "seed": 0},
        {"min_p": 1, "top_p": 1e-9, "typical_p": 1e-9, "temperature": 1e-9, "seed": 2**100, "ignore_eos": True},
        {"max_new_tokens": np.int64(3), "temperature": np.float32(0.5), "top_k": np.int32(2), "seed": np.uint32(7)},
        {"presence_penalty": -2, "frequency_penalty": 2, "typical_p": 1, "no_repeat_ngram_size": 1, "min_new_tokens": 128},
        {"presence_penalty": np.float16(2), "frequency_penalty": np.float64(-2), "logprobs": 0, "include_stop": True},
        {"logprobs": MAX_LOGPROBS, "repetition_penalty": 5e-324, "temperature": 1.7e308},
        *({"acceptance": rule} for rule in ACCEPTANCE_RULES),
    ],
)
def test_the_edges_of_the_ranges_and_numpy_numbers_are_taken(fields: dict[str, object]) -> None:
    params = SamplingParams(**fields)
    assert {name: getattr(params, name) for name in fields} == fields


def test_the_defaults_are_greedy_and_change_nothing() -> None:
    params = SamplingParams()
    assert params.greedy
    assert (params.top_k, params.top_p, params.min_p, params.typical_p) == (0, 1, 0, 1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1, 0, 0)
    assert (params.logit_bias, params.bad_words, params.no_repeat_ngram_size, params.min_new_tokens) == ({}, (), 0, 0)
    assert (params.stop, params.stop_token_ids, params.seed, params.logprobs) == ((), (), None, None)
    assert params.acceptance == "rejection"


def test_stop_may_be_one_string_or_several() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_what_the_caller_changes_afterwards_changes_nothing() -> None:
    stop, ids, words, bias = ["a"], [5], [[1, 2], "no"], {3: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, bad_words=words, logit_bias=bias)
    stop.append("b")
    ids.append(6)
    words[0].append(3)
    words.append("more")
    bias[4] = 2.0
    assert (params.stop, params.stop_token_ids, params.bad_words) == (("a",), (5,), ((1, 2), "no"))
    assert params.logit_bias == {3: 1.0}


def test_numpy_ids_become_plain_ones() -> None:
    params = SamplingParams(
        stop_token_ids=[np.int64(5)], bad_words=[[np.int32(1), 2]], logit_bias={np.int64(3): np.float32(0.5), 4: 1}
    )
    assert {type(token) for token in (*params.stop_token_ids, *params.bad_words[0], *params.logit_bias)} == {int}
    assert {type(value) for value in params.logit_bias.values()} == {float}


def test_params_are_values_that_cannot_be_changed() -> None:
    one, same = (SamplingParams(stop=["a"], bad_words=[[1]], logit_bias={1: 2.0}) for _ in range(2))
    assert one == same
    assert hash(one) == hash(same)
    assert one != SamplingParams(stop=["a"], bad_words=[[1]], logit_bias={1: 3.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.top_k = 3


CHANGES = {
    "an entry": lambda bias: bias.__setitem__(1, 3.0),
    "no entry": lambda bias: bias.__delitem__(1),
    "or": lambda bias: bias.__ior__({2: 3.0}),
    "clear": lambda bias: bias.clear(),
    "pop": lambda bias: bias.pop(1),
    "popitem": lambda bias: bias.popitem(),
    "setdefault": lambda bias: bias.setdefault(2, 3.0),
    "update": lambda bias: bias.update({1: 3.0}),
    "update by name": lambda bias: bias.update(one=3.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_bias_cannot_be_changed(name: str) -> None:
    params = SamplingParams(logit_bias={1: 2.0})
    with pytest.raises(TypeError, match=r"^logit_bias cannot be changed: make new SamplingParams, with dataclasses\.replace"):
        CHANGES[name](params.logit_bias)
    assert params == SamplingParams(logit_bias={1: 2.0})


def test_no_way_to_change_a_dict_is_left_open() -> None:
    own = {name for name in vars(dict) if name not in vars(object)} - {"__or__", "__ror__", "copy", "fromkeys", "get"}
    reading = {"__contains__", "__getitem__", "__iter__", "__len__", "__reversed__", "__class_getitem__"}
    assert own - reading - {"items", "keys", "values"} <= vars(TokenBias).keys()


def test_params_with_a_bias_are_copied_pickled_shown_and_written() -> None:
    params = SamplingParams(logit_bias={1: 2.0}, stop=["a"])
    written = [pickle.dumps(params, protocol) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    copies = [pickle.loads(one) for one in written]  # noqa: S301 - written here
    for same in (*copies, copy.copy(params), copy.deepcopy(params), dataclasses.replace(params)):
        assert same == params
        assert same.logit_bias == {1: 2.0}
        with pytest.raises(TypeError, match="cannot be changed"):
            same.logit_bias[1] = 3.0
    assert "logit_bias={1: 2.0}" in repr(params)
    assert json.loads(json.dumps(dataclasses.asdict(params)))["logit_bias"] == {"1": 2.0}
    assert dataclasses.replace(params, logit_bias=params.logit_bias | {3: 1.0}).logit_bias == {1: 2.0, 3: 1.0}


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (0.0, True), (1e-9, False), (1, False)])
def test_greedy_is_temperature_zero(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy
