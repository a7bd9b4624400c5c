"""Only the largest logits come from a device, and the text is that of whole rows, bit for bit."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime import sampling
from runtime.candidates import Columns
from runtime.decoder import Cancelled, Decoder
from runtime.draft_vocabulary import DraftVocabulary
from runtime.errors import LogitsError
from runtime.generation import GenerationResult
from runtime.pair import DecoderPair
from runtime.pass_costs import PassCosts
from runtime.sampling import Sampler
from runtime.sampling_params import SamplingParams
from runtime.session import Session
from runtime.steps import SteppedModel
from runtime.top_logits import SPARE, TopLogits
from tests.fakes import FakeContext, FakeModel, fake_tokenizer

PROMPT = [1, 2, 3, 1, 2]
COSTS = PassCosts(((1, 10.0), (2, 10.5), (17, 12.0)), ((1, 0.5), (8, 1.0)))
VOCAB = 24
GREEDY = Sampler(SamplingParams())


class DeviceContext(FakeContext):
    """A context that finds the largest logits itself, equal ones in no order a host could count on."""

    max_top = 15
    last: TopLogits | None = None

    def run(self, token_ids: NDArray[np.int64], past_length: int, num_rows: int) -> NDArray[np.float32]:
        self._model.whole_rows += num_rows
        return super().run(token_ids, past_length, num_rows)

    def run_top(
        self, token_ids: NDArray[np.int64], past_length: int, num_rows: int, count: int, temperature: float
    ) -> TopLogits:
        if self.last is not None:  # what was given before may be overwritten
            self.last.tokens[:], self.last.logits[:] = 0, 100
        assert 1 <= count <= self.max_top
        assert count < self._model.spec.vocab_size
        rows = super().run(token_ids, past_length, num_rows)
        tokens = rows[:, ::-1].argsort(axis=1)[:, ::-1][:, :count]
        tokens = rows.shape[1] - 1 - tokens
        logits = np.take_along_axis(rows, tokens, axis=1)
        with np.errstate(invalid="ignore"):
            totals = np.exp((rows - rows.max(axis=1, keepdims=True)) / np.float32(temperature)).sum(axis=1)
        self._model.top_counts.add(count)
        self.last = TopLogits(tokens, logits, totals, temperature)
        return self.last


class QueueContext(DeviceContext):
    """One that also feeds its own choices."""

    def run_chain(self, token_ids: NDArray[np.int64], past_length: int, row: int, num_passes: int) -> TopLogits:
        self._model.chains.append(num_passes)
        found = []
        for _ in range(num_passes):
            found.append(self.run_top(token_ids, past_length, len(token_ids) - row, 1, 1.0).first(1).copy())
            past_length, row = past_length + row + 1, 0
            token_ids = np.full(self._model.spec.rows_of_pass(1), found[-1].tokens[0, 0])
        return TopLogits(*(np.concatenate([getattr(one, name) for one in found]) for name in ("tokens", "logits", "totals")))


class DeviceModel(FakeModel):
    """Its logits are those of a FakeModel of the same arguments, rounded where ties are wanted."""

    def __init__(
        self, vocab_size: int = VOCAB, *, form: type[FakeContext] = QueueContext, step: float = 0, **arguments: object
    ):
        super().__init__(vocab_size, **arguments)
        self.form, self.step = form, step
        self.whole_rows, self.top_counts, self.chains = 0, set(), []

    def open_context(self, capacity: int, max_rows: int) -> FakeContext:
        return self.form(self, capacity, max_rows)

    def logits(self, prefix: NDArray[np.int64]) -> NDArray[np.float32]:
        row = super().logits(prefix)
        return np.round(row / self.step) * np.float32(self.step) if self.step else row


def pair_of(
    form: type[FakeContext], draft_vocab: int = VOCAB, draft_broken: int | None = None, **target: object
) -> DecoderPair:
    step = float(target.get("step", 0))
    draft = DeviceModel(draft_vocab, form=form, noise=1.0, sharpness=5.0, min_rows=2, broken_at=draft_broken, step=step)
    models = (DeviceModel(form=form, sharpness=5.0, **target), draft)
    return DecoderPair(*models, fake_tokenizer(VOCAB), frozenset(), "model", 4, known_costs=COSTS, max_slowdown=1.0)


def generate(pair: DecoderPair, drafter: str, **params: object) -> GenerationResult:
    return Session(pair, 100).generate(PROMPT, SamplingParams(max_new_tokens=40, seed=11, **params), drafter=drafter)


def counts_of(result: GenerationResult) -> dict[str, object]:
    stats = dataclasses.asdict(result.stats)
    device = {"draft_passes", "target_passes", "top_logits", "repeated_passes"}
    return {name: value for name, value in stats.items() if "seconds" not in name and name not in device}


RULES = {
    "greedy": (SamplingParams(), 1),
    "coupled": (SamplingParams(temperature=0.8, top_k=5, acceptance="coupled"), 5),
    "rejection": (SamplingParams(temperature=0.8, top_k=5), 5),
    "all filters": (SamplingParams(temperature=1.3, top_k=8, top_p=0.9, min_p=0.05, typical_p=0.95), 8),
    "one left": (SamplingParams(temperature=1.3, top_k=1), 1),
}


def changed(params: SamplingParams) -> dict[str, object]:
    default = SamplingParams()
    return {f.name: v for f in dataclasses.fields(params) if (v := getattr(params, f.name)) != getattr(default, f.name)}


# These decide by the logits that came, mostly.
MOSTLY = {
    "top-p": SamplingParams(temperature=0.8, top_p=0.9),
    "top-p coupled": SamplingParams(temperature=1.4, top_p=0.7, acceptance="coupled"),
    "min-p": SamplingParams(temperature=1.0, min_p=0.05),
    "all cuts": SamplingParams(temperature=1.2, top_p=0.95, min_p=0.02, typical_p=0.9, acceptance="coupled"),
    "greedy penalties": SamplingParams(
        repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1, logit_bias={3: -1.0}, bad_words=[[5], [4, 6]]
    ),
    "top-k penalties": SamplingParams(
        temperature=1.0, top_k=2, repetition_penalty=1.3, no_repeat_ngram_size=3, min_new_tokens=5, acceptance="coupled"
    ),
}


@pytest.fixture(autouse=True)
def _few_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_NUCLEUS", 8)


@pytest.mark.parametrize("step", [0, 0.5], ids=["any", "equal"])
@pytest.mark.parametrize("drafter", ["off", "lookup", "model"])
@pytest.mark.parametrize("rule", MOSTLY)
def test_the_text_is_that_of_whole_rows_where_few_come(rule: str, drafter: str, step: float) -> None:
    params = changed(MOSTLY[rule])
    expected = generate(pair_of(FakeContext, period=3, step=step), drafter, **params)
    pair = pair_of(DeviceContext, period=3, step=step)
    found = generate(pair, drafter, **params)
    assert found.token_ids == expected.token_ids
    assert counts_of(found) == counts_of(expected)
    assert (found.stats.top_logits, expected.stats.top_logits) == (8, 0)
    assert found.stats.target_passes == expected.stats.target_passes + found.stats.repeated_passes
    assert found.stats.repeated_passes < found.stats.rounds / 2


@pytest.mark.parametrize(
    ("params", "tokens", "logits", "rest", "decides"),
    [
        # Of 1, 1/2, 1/4, 1/8 and a rest of 1/8, half the mass is the first token, three quarters are the first two.
        ({"top_p": 0.5}, [4, 2, 7, 1], [0, -1, -2, -3], 0.125, False),  # to the last bit: the sum may be rounded
        ({"top_p": 0.49}, [4, 2, 7, 1], [0, -1, -2, -3], 0.125, True),
        ({"top_p": 0.51}, [4, 2, 7, 1], [0, -1, -2, -3], 0.125, True),
        ({"top_p": 0.874}, [4, 2, 7, 1], [0, -1, -2, -3], 0.125, True),
        ({"top_p": 0.876}, [4, 2, 7, 1], [0, -1, -2, -3], 0.125, False),  # the last that came may have equals
        ({"top_p": 0.95}, [4, 2, 7, 1], [0, -1, -2, -3], 0.125, False),
        ({"top_p": 0.95}, [4, 2, 7, 1], [0, -1, -2, -3], 0.0, False),
        ({"top_p": 0.95, "min_p": 0.2}, [4, 2, 7, 1], [0, -1, -2, -3], 0.125, True),
        ({"min_p": 0.2}, [4, 2, 7, 1], [0, -1, -2, -3], 0.125, True),
        ({"min_p": 0.1}, [4, 2, 7, 1], [0, -1, -2, -3], 0.125, False),
        ({"temperature": 0.0, "repetition_penalty": 1.5}, [4, 2, 7, 1], [0, -1, -2, -3], 0.125, True),
        ({"temperature": 0.0, "repetition_penalty": 1.5}, [4, 2, 3, 1], [0, -1, -2, -3], 0.125, False),  # all were seen
        ({"temperature": 0.0, "repetition_penalty": 1.5}, [9, 2, 4, 3], [0, 0, 0, 0], 0.125, False),
        ({"temperature": 0.0, "logit_bias": {9: -1.0}}, [4, 2, 9, 1], [0, -1, -2, -3], 0.125, False),
        ({"top_k": 2, "bad_words": [[9]]}, [8, 9, 7, 1], [0, -1, -2, -3], 0.125, True),
        ({"top_k": 2, "bad_words": [[9]]}, [8, 9, 4, 1], [0, -1, -2, -3], 0.125, False),
    ],
    ids=str,
)
def test_when_a_few_logits_decide(
    params: dict[str, object], tokens: list[int], logits: list[float], rest: float, decides: bool
) -> None:
    rules = SamplingParams(**{"temperature": 1 / np.log(2), **params})
    row = np.array([logits], np.float32)
    total = np.exp2(row).sum() + rest if rules.temperature else np.exp(row).sum() + rest
    top = TopLogits(np.array([tokens]), row, np.array([total], np.float32), rules.temperature or 1.0)
    words = [tuple(word) for word in params.get("bad_words", ())]
    assert Sampler(rules, bad_words=words).decides(top, [1, 2, 3], [4]) == decides


@pytest.mark.parametrize("drafter", ["off", "lookup", "model", "hybrid", "auto"])
@pytest.mark.parametrize("form", [DeviceContext, QueueContext])
@pytest.mark.parametrize("rule", RULES)
def test_the_text_is_that_of_whole_rows_and_none_come(rule: str, form: type[FakeContext], drafter: str) -> None:
    params, num_top = RULES[rule]
    period = 3 if drafter == "lookup" else 0
    expected = generate(pair_of(FakeContext, period=period), drafter, **changed(params))
    pair = pair_of(form, period=period)
    found = generate(pair, drafter, **changed(params))
    assert found.token_ids == expected.token_ids
    assert counts_of(found) == counts_of(expected)
    assert (found.stats.top_logits, expected.stats.top_logits) == (num_top, 0)
    assert pair.target.whole_rows == 0
    assert pair.target.top_counts == {num_top + SPARE}
    rejects = rule in ("rejection", "all filters", "one left")
    # How sure the draft is decides how much "auto" proposes, and so what is drawn: it must not be a device's rounding.
    assert (pair.draft.whole_rows > 0) == (drafter == "auto" and rejects)
    assert bool(pair.draft.calls) == (drafter not in ("off", "lookup"))
    chained = drafter == "model" and form is QueueContext and not rejects and num_top == 1
    assert bool(pair.draft.chains) == chained


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.8},
        {"temperature": 0.8, "typical_p": 0.5},
        {"temperature": 0.8, "top_k": 9},  # more than the context finds
        {"logprobs": 1},
        {"repetition_penalty": 0.9},  # what raises a logit may raise one that did not come
        {"presence_penalty": -0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {3: -1.0, 4: 1.0}},
        {"temperature": 0.8, "top_p": 0.5, "repetition_penalty": 1.2},
        {"temperature": 0.8, "min_new_tokens": 3},
    ],
    ids=str,
)
def test_rules_that_need_whole_rows_get_them(params: dict[str, object]) -> None:
    expected = generate(pair_of(FakeContext), "model", **params)
    pair = pair_of(QueueContext)
    found = generate(pair, "model", **params)
    assert (found.token_ids, counts_of(found)) == (expected.token_ids, counts_of(expected))
    assert found.stats.top_logits == 0
    assert not pair.target.top_counts | pair.draft.top_counts


@pytest.mark.parametrize("rule", RULES)
def test_logits_that_tie_at_the_end_of_what_came_are_all_looked_at(rule: str) -> None:
    params, _ = RULES[rule]
    expected = generate(pair_of(FakeContext, step=2.5), "model", **changed(params))
    pair = pair_of(DeviceContext, step=2.5)
    found = generate(pair, "model", **changed(params))
    assert (found.token_ids, counts_of(found)) == (expected.token_ids, counts_of(expected))
    assert found.stats.repeated_passes > 0
    assert pair.target.whole_rows > 0
    assert found.stats.target_passes == expected.stats.target_passes + found.stats.repeated_passes


def test_a_session_decides_anew_for_each_text() -> None:
    pair = pair_of(QueueContext)
    session = Session(pair, 100)
    rules = [SamplingParams(max_new_tokens=9, logprobs=logprobs) for logprobs in (None, 0, None)]
    used = [session.generate(PROMPT, params).stats.top_logits for params in rules]
    assert used == [1, 0, 1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_broken_logits_are_refused_and_the_cache_is_as_before(value: float) -> None:
    model = DeviceModel(broken_at=5, broken_value=value)
    decoder = Decoder(model, 40, num_rows=4)
    decoder.begin([1], None, GREEDY)
    decoder.candidates([1, 2, 3], 1)
    with pytest.raises(LogitsError, match="NaN or infinite logits at position 6: "):
        decoder.candidates([4, 5, 6], 2)
    assert decoder.tokens == [1, 2, 3]
    with pytest.raises(LogitsError, match="NaN or infinite logits at position "):
        decoder.chain([4, 5], 3)
    assert decoder.tokens == [1, 2, 3]
    assert decoder.chain([4], 2)[0] == model.logits([1, 2, 3, 4]).argmax()


def test_a_chain_is_forward_and_choose_again_and_again() -> None:
    for rows in ({}, {"min_rows": 3}, {"row_multiple": 4}):
        model = DeviceModel(**rows)
        decoder = Decoder(model, 300, num_rows=1)
        prompt = np.random.default_rng(0).integers(0, VOCAB, 280).tolist()  # more than one pass
        decoder.begin(prompt, None, GREEDY)
        text = [*prompt]
        for unread, wanted in (([*prompt], 4), ([7, 8], 1), ([9], 10)):
            text = [*decoder.tokens, *unread]
            expected = []
            for _ in range(wanted):
                expected.append(int(model.logits([*text, *expected]).argmax()))
            assert decoder.chain(unread, wanted) == expected
            assert decoder.tokens == [*text, *expected[:-1]]
        assert decoder.passes == 2 - 1 + 4 + 1 + 10
        assert decoder.room() == 300 - len(decoder.tokens)


def test_a_chain_hears_of_a_cancellation_before_it_begins() -> None:
    decoder, cancel = Decoder(DeviceModel(), 40, num_rows=1), threading.Event()
    decoder.begin([1], cancel, GREEDY)
    cancel.set()
    with pytest.raises(Cancelled):
        decoder.chain([1, 2], 3)
    assert decoder.tokens == []


def test_nothing_is_proposed_behind_an_end_or_beyond_the_drafts_context() -> None:
    for form in (FakeContext, QueueContext):
        pair = pair_of(form)
        token = generate(pair, "off").token_ids[6]
        ended = generate(pair, "model", stop_token_ids=[token])
        short = DecoderPair(
            pair.target,
            DeviceModel(form=form, noise=1.0, sharpness=5.0, context_length=20),
            pair.tokenizer,
            frozenset(),
            "model",
            4,
        )
        cut = generate(short, "model")
        if form is FakeContext:
            expected = [(result.token_ids, counts_of(result)) for result in (ended, cut)]
    assert [(result.token_ids, counts_of(result)) for result in (ended, cut)] == expected
    assert ended.finish_reason == "stop"


@pytest.mark.parametrize("draft_vocab", [VOCAB - 4, VOCAB + 4])
def test_a_draft_of_another_width_proposes_the_same(draft_vocab: int) -> None:
    expected = generate(pair_of(FakeContext, draft_vocab), "model")
    pair = pair_of(QueueContext, draft_vocab)
    found = generate(pair, "model")
    assert (found.token_ids, counts_of(found)) == (expected.token_ids, counts_of(expected))
    # What lies beyond the target's tokens may be the largest.
    assert bool(pair.draft.whole_rows) == (draft_vocab > VOCAB)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("drafter", ["model", "auto"])
def test_a_draft_with_columns_of_its_own_proposes_the_same(whole: bool, drafter: str) -> None:
    to_target = np.random.default_rng(2).permutation(VOCAB).astype(np.int32)
    if not whole:
        to_target[:6] = -1
    vocabulary = DraftVocabulary(VOCAB, VOCAB, to_target)
    results = []
    for form in (FakeContext, QueueContext):
        pair = dataclasses.replace(pair_of(form), draft_vocabulary=vocabulary)
        results.append(generate(pair, drafter))
    expected, found = results
    assert (found.token_ids, counts_of(found)) == (expected.token_ids, counts_of(expected))
    assert pair.target.whole_rows == 0
    assert pair.draft.calls
    # What stands for no token of the target may be the largest.
    assert bool(pair.draft.whole_rows) != whole
    assert not pair.draft.chains  # its columns are not what it reads


@pytest.mark.parametrize("rule", RULES)
def test_passes_in_steps_bring_no_more(rule: str) -> None:
    params, num_top = RULES[rule]
    results = []
    for form in (FakeContext, QueueContext):
        pair = pair_of(form)
        stepped = dataclasses.replace(pair, target=SteppedModel(pair.target, 3), draft=SteppedModel(pair.draft, 2))
        results.append(generate(stepped, "model", **changed(params)))
    expected, found = results
    assert (found.token_ids, counts_of(found)) == (expected.token_ids, counts_of(expected))
    assert (pair.target.whole_rows, pair.draft.whole_rows) == (0, 0)
    assert (found.stats.top_logits, expected.stats.top_logits) == (num_top, 0)


def test_rows_have_a_column_for_what_any_of_them_brought() -> None:
    random = np.random.default_rng(3)
    for count, width in ((2, 4), (5, 1), (1, 9), (5, 3), (3, 3)):
        tokens = np.stack([random.permutation(50)[:width] for _ in range(count)])
        logits = random.normal(size=(count, width)).astype(np.float32)
        expected = np.full((count, 50), -np.inf, np.float32)
        for row, places, values in zip(expected, tokens, logits, strict=True):
            row[places] = values
        found = TopLogits(tokens, logits, np.ones(count, np.float32)).candidates()
        assert found.columns.token_ids.tolist() == sorted(set(tokens.ravel().tolist()))
        logits[:], tokens[:] = 0, 0  # a context's next pass overwrites what it gave
        assert np.array_equal(found.over(Columns(50), -np.inf), expected)


@pytest.mark.parametrize(("logits", "holds"), [([5, 4, 3], True), ([5, 4, 4], False), ([5, 5, 4], True), ([4, 4, 4], False)])
def test_what_came_decides_where_the_last_of_it_is_smaller(logits: list[float], holds: bool) -> None:
    top = TopLogits(np.array([[0, 1, 2]]), np.array([logits], np.float32), np.ones(1, np.float32))
    assert Sampler(SamplingParams(temperature=1.0, top_k=2)).decides(top, [], []) == holds
