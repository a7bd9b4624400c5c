"""A draft in tokens of its own, against the slow way: the whole text spelled anew for every row."""

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import runtime.decoder
from runtime.acceptance import GreedyRule
from runtime.candidates import Candidates, Columns
from runtime.decoder import Cancelled, Decoder
from runtime.draft_decoder import DraftDecoder
from runtime.draft_vocabulary import DraftVocabulary, Spelling, draft_length
from runtime.drafters import ModelDrafter
from runtime.errors import BundleError, LogitsError
from runtime.generator import Generator
from runtime.memory import MemoryBudget
from runtime.pair import MAX_NUM_DRAFT_TOKENS
from runtime.sampling import Sampler
from runtime.sampling_params import SamplingParams
from runtime.session import Session
from tests.fakes import FakeContext, FakeModel, fake_tokenizer, greedy_text
from tests.plain_decoding import plain_text
from tests.test_memory import RecordingModel

TARGET, DRAFT = 16, 11
# Tokens 3 and 12 are not read at all; 0, 1, 2, 4, 5, 6 and 9 are shared, so that a draft can agree.
SPELLINGS = (
    *((7,), (3,), (0,), (), (10,), (5,), (8,), (1, 2)),
    *((3, 3, 1), (4,), (2, 9), (6, 6, 6, 6), (), (9, 1), (1,), (2, 0, 2)),
)
TO_TARGET = (2, -1, -1, 1, 9, 5, -1, 0, 6, -1, 4)


def vocabulary_of(prefix: Sequence[int] = ()) -> DraftVocabulary:
    return DraftVocabulary(TARGET, DRAFT, np.array(TO_TARGET, np.int32), Spelling.of(SPELLINGS, prefix))


CUT = DraftVocabulary(TARGET, TARGET, np.array([5, 3, 0, 12, 8], np.int32))


def spelled(tokens: Sequence[int], prefix: Sequence[int] = ()) -> list[int]:
    return [*prefix, *(token for place in tokens for token in SPELLINGS[place])]


def expanded(row: np.ndarray, to_target: Sequence[int] = TO_TARGET) -> np.ndarray:
    """One logit at a time."""
    whole = np.full(TARGET, -np.inf, np.float32)
    for column, token in enumerate(to_target):
        if token >= 0:
            whole[token] = row[column]
    return whole


def over_target(candidates: Candidates) -> np.ndarray:
    """A row of candidates as wide as the target's, once their columns have been looked at."""
    token_ids = candidates.columns.token_ids
    assert candidates.rows.shape == (1, candidates.columns.count)
    assert token_ids is None or (np.diff(token_ids) > 0).all()
    return candidates.over(Columns(TARGET), -np.inf)[0]


def draft_decoder(model: FakeModel, vocabulary: DraftVocabulary, max_length: int = 200) -> DraftDecoder:
    return DraftDecoder(Decoder(model, max_length, num_rows=1), vocabulary)


def check(decoder: DraftDecoder, prefix: Sequence[int] = ()) -> None:
    """The draft has cached what the tokens that were read are spelled with, and the prefix with the first."""
    inner = decoder._decoder
    read = spelled(decoder.tokens, prefix) if decoder.tokens else []
    assert inner.tokens == inner._context._cache[: inner.past_length].tolist() == read
    assert decoder.past_length == len(decoder.tokens) == len(decoder._ends)


# --- one row ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [(), (9,), (9, 4)], ids=str)
@pytest.mark.parametrize("text", [[0], [11], [8, 3], [3, 12, 15], [7, 3, 12], [1, 3, 3, 12, 4, 12], list(range(16))], ids=str)
def test_a_row_is_that_of_the_spelled_text(text: list[int], prefix: tuple[int, ...]) -> None:
    model, vocabulary = FakeModel(DRAFT, seed=2), vocabulary_of(prefix)
    expected = expanded(model.logits(spelled(text, prefix)))
    for cut in range(len(text)):
        decoder = draft_decoder(model, vocabulary)
        for part in (text[:cut], text[cut:]):
            if part and decoder.takes(part):
                logits = decoder.candidates(part, 1)
                check(decoder, prefix)
        if decoder.tokens == text:
            assert np.array_equal(over_target(logits), expected)
            assert logits.rows.dtype == np.float32
        else:
            assert not spelled(text[:cut], prefix), "only a beginning that spells nothing is not taken alone"


def test_nothing_is_proposed_behind_nothing() -> None:
    decoder = draft_decoder(FakeModel(DRAFT), vocabulary_of())
    assert not decoder.takes([3])
    assert not decoder.takes([3, 12])
    assert decoder.takes([3, 12, 0])
    decoder.candidates([3, 12, 0], 1)
    assert decoder.takes([3])
    decoder.rewind_to(2)
    check(decoder)
    assert not decoder.takes([3])
    assert draft_decoder(FakeModel(DRAFT), vocabulary_of([9])).takes([3])


def test_a_token_that_is_not_read_costs_one_pass_and_no_room() -> None:
    model = FakeModel(DRAFT)
    decoder = draft_decoder(model, vocabulary_of(), max_length=4)
    decoder.candidates([0, 15], 1)
    model.calls.clear()
    for _ in range(3):
        assert decoder.takes([12])
        decoder.candidates([12], 1)
    assert model.calls == [(1, 3, 1)] * 3  # the last token that was spelled, again
    assert not decoder.takes([0])


@pytest.mark.parametrize(("max_length", "taken"), [(3, False), (4, True), (5, True)])
def test_the_drafts_own_tokens_must_fit(max_length: int, taken: bool) -> None:
    decoder = draft_decoder(FakeModel(DRAFT), vocabulary_of([9]), max_length)
    assert decoder.takes([15]) == taken
    assert decoder.takes([0, 0, 0]) == taken


def test_a_cut_head_reads_what_its_embedding_has() -> None:
    model = FakeModel(TARGET, seed=2)
    vocabulary = DraftVocabulary(TARGET, 14, CUT.to_target)
    decoder = DraftDecoder(Decoder(CutModel(model, CUT.to_target), 50, num_rows=1), vocabulary)
    text = [13, 2, 13]
    assert decoder.takes(text)
    row = model.logits(text)[CUT.to_target]
    assert np.array_equal(over_target(decoder.candidates(text, 1)), expanded(row, CUT.to_target.tolist()))
    assert not decoder.takes([14])


# --- any order --------------------------------------------------------------------------------------------------------

texts = st.lists(st.integers(0, TARGET - 1), min_size=1, max_size=9)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("read"), texts),
        st.tuples(st.just("rewind"), st.integers(0, 40)),
        st.tuples(st.just("begin"), texts),
        st.tuples(st.just("return"), st.integers(1, 40)),
        st.tuples(st.just("fork"), texts),
        st.tuples(st.just("cancel"), texts),
        st.tuples(st.just("break"), texts),
    ),
    min_size=4,
    max_size=25,
)


class SetAfter:
    """An event that is set when it has been looked at so many times."""

    def __init__(self, looks: int) -> None:
        self._looks = looks

    def is_set(self) -> bool:
        self._looks -= 1
        return self._looks < 0


@pytest.fixture
def _short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.decoder, "_MAX_ROWS", 3)


@pytest.mark.usefixtures("_short_passes")
@pytest.mark.parametrize("prefix", [(), (9, 4)], ids=str)
@pytest.mark.parametrize("min_rows", [1, 3])
def test_reading_rewinding_and_forking_in_any_order(prefix: tuple[int, ...], min_rows: int) -> None:
    vocabulary = vocabulary_of(prefix)

    @settings(max_examples=120, deadline=None, derandomize=True)
    @given(steps)
    def run(script: list[tuple[str, object]]) -> None:
        model = FakeModel(DRAFT, seed=2, min_rows=min_rows)
        decoder, read = draft_decoder(model, vocabulary, 1000), []
        for step, argument in script:
            if step == "rewind":
                decoder.rewind_to(argument)
                del read[argument:]
            elif step in ("begin", "return"):
                prompt = argument if step == "begin" else [*read, 5][:argument]
                decoder.begin(prompt, None)
                common = [one == other for one, other in zip(read, prompt[:-1], strict=False)]
                read = read[: [*common, False].index(False)]
                assert (decoder.passes, decoder.seconds) == (0, 0.0)
            elif step in ("cancel", "break"):
                read = interrupted(decoder, model, argument, step)
            else:
                read = read_both(decoder, model, vocabulary, argument, fork=step == "fork")
            assert decoder.tokens == read
            check(decoder, prefix)

    run()


def read_both(
    decoder: DraftDecoder, model: FakeModel, vocabulary: DraftVocabulary, text: list[int], *, fork: bool
) -> list[int]:
    """Reads a text; with `fork`, other tokens in a fork before it. Returns what has been read."""
    read, prefix = list(decoder.tokens), vocabulary.spelling.prefix
    if fork:
        other = decoder.fork()
        for part in (text[::-1], text):
            if other.takes(part):
                other.candidates(part, 1)
        check(other, prefix)
    if not decoder.takes(text):
        assert not spelled([*read, *text], prefix)
        return read
    logits = decoder.candidates(text, 1)
    assert np.array_equal(over_target(logits), expanded(model.logits(spelled([*read, *text], prefix))))
    return [*read, *text]


def interrupted(decoder: DraftDecoder, model: FakeModel, text: list[int], how: str) -> list[int]:
    """Reads until it is cancelled, or until the model breaks. Returns what is still read: some beginning of the whole."""
    whole = [*decoder.tokens, *text]
    if decoder.takes(text):
        decoder.cancel = SetAfter(len(text) % 4) if how == "cancel" else None
        model.broken_at = None if how == "cancel" else len(spelled(whole, decoder._vocabulary.spelling.prefix)) - 1
        try:
            decoder.candidates(text, 1)
        except (Cancelled, LogitsError):
            assert len(decoder.tokens) <= len(whole)
        decoder.cancel = model.broken_at = None
    assert decoder.tokens == whole[: len(decoder.tokens)]
    return list(decoder.tokens)


@pytest.mark.usefixtures("_short_passes")
def test_a_cancelled_reading_is_not_begun_anew() -> None:
    model = FakeModel(DRAFT, seed=2)
    decoder = draft_decoder(model, vocabulary_of())
    decoder.begin([11, 15, 11, 15, 0], SetAfter(3))
    with pytest.raises(Cancelled):
        decoder.candidates([11, 15, 11, 15, 0], 1)
    assert decoder.tokens == [11, 15]  # seven of the nine ids that were cached
    check(decoder)


# --- generation -------------------------------------------------------------------------------------------------------

RULES = {
    "greedy": SamplingParams(max_new_tokens=24, logprobs=1),
    "rejection": SamplingParams(max_new_tokens=24, logprobs=1, temperature=0.9, seed=6, repetition_penalty=1.2),
    "coupled": SamplingParams(max_new_tokens=24, logprobs=1, temperature=0.9, seed=6, acceptance="coupled"),
}
PROMPTS = ([3, 8, 12], [3, 8, 12, 15, 15], [5, 3], [5, 3, 11, 7, 12, 12], [3, 8, 12])
every_rule = pytest.mark.parametrize("rule", RULES)


class RespellingDraft:
    """The draft as a model of target tokens that spells the whole text for every row."""

    def __init__(self, model: FakeModel, prefix: Sequence[int] = ()) -> None:
        self._model, self._prefix = model, prefix

    def logits(self, text: Sequence[int]) -> np.ndarray:
        return expanded(self._model.logits(spelled(text, self._prefix)))


class CutModel:
    """A model that gives a few columns of another's logits; see backend.Model."""

    def __init__(self, model: FakeModel, columns: np.ndarray) -> None:
        self.spec = dataclasses.replace(model.spec, vocab_size=len(columns))
        self.engine = self.description = model.engine
        self._model, self._columns = model, columns

    def open_context(self, capacity: int, max_rows: int) -> "CutContext":
        return CutContext(self._model.open_context(capacity, max_rows), self._columns)


class CutContext:
    def __init__(self, context: FakeContext, columns: np.ndarray) -> None:
        self._whole, self._columns = context, columns

    def run(self, token_ids: np.ndarray, past_length: int, num_rows: int) -> np.ndarray:
        return self._whole.run(token_ids, past_length, num_rows)[:, self._columns]

    def copy_from(self, source: "CutContext", length: int) -> None:
        self._whole.copy_from(source._whole, length)


def generator_of(vocabulary: DraftVocabulary, *, context_length: int = 400, drafter: str = "model") -> Generator:
    target = FakeModel(TARGET, seed=1, sharpness=2.0)
    draft = FakeModel(DRAFT, seed=5, sharpness=2.0, context_length=context_length)
    if vocabulary is CUT:
        draft = CutModel(FakeModel(TARGET, seed=1, sharpness=2.0), CUT.to_target)
    return Generator(target, draft, fake_tokenizer(TARGET), (), drafter=drafter, draft_vocabulary=vocabulary)


def slow(generator: Generator, prefix: Sequence[int]) -> SimpleNamespace:
    draft = RespellingDraft(generator.draft, prefix)
    return SimpleNamespace(target=generator.target, draft=draft, tokenizer=generator.tokenizer, _pair=generator._pair)


@every_rule
@pytest.mark.parametrize("prefix", [(), (9,)], ids=str)
def test_a_session_proposes_what_the_slow_way_does(rule: str, prefix: tuple[int, ...]) -> None:
    generator = generator_of(vocabulary_of(prefix))
    session, accepted = generator.session(), 0
    for prompt in PROMPTS:
        result = session.generate(prompt, RULES[rule], num_draft_tokens=4)
        plain = plain_text(slow(generator, prefix), prompt, RULES[rule], "model", 4)
        assert list(result.token_ids) == plain.token_ids
        stats = result.stats
        if rule == "rejection":  # its rounds are never cut short by the limit
            assert (stats.proposed_by_position, stats.accepted_by_position) == (plain.proposed, plain.accepted)
        accepted += stats.accepted_tokens
        check(session._draft, prefix)
    assert accepted > 0


@every_rule
@pytest.mark.parametrize("drafter", ["model", "hybrid", "auto"])
@pytest.mark.parametrize("vocabulary", [vocabulary_of(), vocabulary_of([9]), CUT], ids=["spelled", "prefixed", "cut"])
def test_a_text_is_the_targets_own(rule: str, drafter: str, vocabulary: DraftVocabulary) -> None:
    generator = generator_of(vocabulary, drafter=drafter)
    session, proposed = generator.session(), 0
    for prompt in PROMPTS:
        result = session.generate(prompt, RULES[rule])
        proposed += result.stats.proposed_tokens
        if rule != "rejection":
            assert result.token_ids == generator.generate(prompt, RULES[rule], drafter="off").token_ids
        if rule == "greedy":
            assert list(result.token_ids) == greedy_text(generator.target, prompt, 24)
    assert proposed > 0 or drafter == "auto"


def test_what_a_cut_head_proposes_is_judged_by_the_row_it_was_drawn_from() -> None:
    generator = generator_of(CUT)
    pieces = list(generator.stream([5, 1], RULES["rejection"], num_draft_tokens=3))
    rounds = [piece.round for piece in pieces if piece.round is not None]
    tokens = {token for done in rounds for token in done.proposal.tokens}
    assert tokens <= set(CUT.to_target.tolist())
    assert len(tokens) > 2
    for done in rounds:
        for token, row in zip(done.proposal.tokens, done.proposal.probs, strict=True):
            assert set(row.columns.tokens(np.flatnonzero(row.rows[0]))) <= set(CUT.to_target.tolist())
            assert row.number(0, token) > 0
            assert row.rows.sum() == pytest.approx(1, abs=1e-6)


def test_a_fork_of_a_session_goes_on_with_what_the_draft_has_read() -> None:
    generator = generator_of(vocabulary_of([9]))
    session = generator.session()
    text = session.generate([5, 11, 3], RULES["greedy"]).token_ids
    fork = session.fork()
    longer = [5, 11, 3, *text, 15, 12]
    assert session.generate([1], RULES["greedy"]).token_ids
    generator.draft.calls.clear()
    result = fork.generate(longer, RULES["greedy"])
    assert generator.draft.calls[0][0] > len(text)
    assert result.token_ids == generator.generate(longer, RULES["greedy"], drafter="off").token_ids
    check(fork._draft, [9])


def test_behind_a_gap_the_draft_goes_on_from_what_it_has_read() -> None:
    model = FakeModel(DRAFT, seed=2)
    rule = GreedyRule(Sampler(SamplingParams(), prompt_length=1))
    drafter = ModelDrafter(draft_decoder(model, vocabulary_of([9])), rule, target_vocab_size=TARGET, end_token_ids=frozenset())
    text = [(5 * place + place * place) % TARGET for place in range(40)]
    drafter.logits(text[:10], [])
    drafter.skip_to_last(4, text[:30])
    assert drafter.missing(text[:30], []) == 4
    for read, sequence, block in (
        (text[:10] + text[26:30], text[:30], []),
        (text[:10] + text[26:30] + [12, 3], text[:30], [12, 3]),
        (text[:10] + text[26:33], text[:33], []),
        (text[:22], text[:22], []),
    ):
        drafter.rewind_to(len(sequence) - 1 if len(sequence) < 33 else 29)
        logits = drafter.logits(sequence, block)
        assert np.array_equal(over_target(logits), expanded(model.logits(spelled(read, [9]))))


@pytest.mark.parametrize("context_length", [4, 9, 30, 60])
def test_a_draft_whose_context_ends_lets_the_text_go_on(context_length: int) -> None:
    generator = generator_of(vocabulary_of([9]), context_length=context_length)
    prompt = [15, 0, 11]
    result = generator.generate(prompt, RULES["greedy"])
    assert list(result.token_ids) == greedy_text(generator.target, prompt, 24)
    assert (result.stats.proposed_tokens > 0) == (context_length >= 9)
    assert all(past + rows <= context_length for past, rows, _ in generator.draft.calls)


# --- what belongs to it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [vocabulary_of(), vocabulary_of([9]), CUT], ids=["spelled", "prefixed", "cut"])
@pytest.mark.parametrize("draft_context", [50, 400])
def test_the_budget_is_what_a_session_allocates(vocabulary: DraftVocabulary, draft_context: int) -> None:
    target = RecordingModel(vocab_size=TARGET, context_length=300)
    draft = RecordingModel(vocab_size=len(vocabulary.to_target), context_length=draft_context)
    generator = Generator(target, draft, fake_tokenizer(TARGET), (), drafter="model", draft_vocabulary=vocabulary)
    Session(generator._pair, 100).start([1])
    ((slots, rows),) = draft.opened
    expected = min(draft_context, draft_length(100 + MAX_NUM_DRAFT_TOKENS, vocabulary))
    assert slots == expected + 1  # and the spare one
    with_draft = MemoryBudget.of(target.spec, draft.spec, 100, vocabulary)
    without = MemoryBudget.of(target.spec, None, 100)
    assert with_draft.caches - without.caches == slots * draft.spec.cache_bytes_per_token
    assert with_draft.logits - without.logits == rows * draft.spec.vocab_size * 4


def test_the_vocabulary_of_another_pair_is_refused() -> None:
    for target, draft in ((FakeModel(TARGET + 1), FakeModel(DRAFT)), (FakeModel(TARGET), FakeModel(DRAFT - 1))):
        with pytest.raises(BundleError, match="belongs to other models"):
            Generator(target, draft, fake_tokenizer(TARGET), (), draft_vocabulary=vocabulary_of())


def test_the_description_tells_what_the_draft_can_propose() -> None:
    assert generator_of(vocabulary_of()).describe()["draft vocabulary"] == "7 of 16 target tokens; reads its own tokens"
    assert "draft vocabulary" not in Generator(FakeModel(), FakeModel(), fake_tokenizer(), ()).describe()


@pytest.mark.parametrize("vocabulary", [vocabulary_of([9]), CUT], ids=["spelled", "cut"])
def test_such_a_pair_is_certified(vocabulary: DraftVocabulary) -> None:
    pytest.importorskip("scipy")
    from runtime.certificate.plan import certificate_checks

    checks = certificate_checks(
        generator_of(vocabulary), ["lpibdm"], max_new_tokens=4, max_num_draft_tokens=2, samples=200, chat=False
    )
    # Of the laws those of the first token, which also hold the rate of acceptance against the two rows.
    checks = [check for check in checks if getattr(check, "positions", 1) == 1 and getattr(check, "drafter", "") != "lookup"]
    verdicts = [verdict for check in checks for verdict in check.run(lambda: None)]
    assert [verdict.claim for verdict in verdicts if not verdict.passed] == []
    assert sum("as often as the two distributions allow" in verdict.claim for verdict in verdicts) == 2
