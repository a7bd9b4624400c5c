"""Every family of the README's table, tiny: exported and held against torch, drafted for, rewound; and the table itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime import Generator, SamplingParams

from .families import BEGIN, END, FAMILIES, README, RESULTS, TAKEN, Family, outcomes, table

PROMPT = "The tides are the regular rise and fall"
TURNED = "The tides are the moon's"
GREEDY = SamplingParams(max_new_tokens=24, min_new_tokens=24)


@pytest.fixture(scope="module")
def recorded() -> dict[str, dict[str, str]]:
    results: dict[str, dict[str, str]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results


def test_every_family_is_recorded(recorded: dict[str, dict[str, str]]):
    assert [(name, found["model_type"]) for name, found in recorded.items()] == [
        (family.name, family.model_type) for family in FAMILIES
    ]


def test_readme_has_the_table_of_what_is_recorded(recorded: dict[str, dict[str, str]]):
    readme = README.read_text(encoding="utf-8")
    assert readme.count(BEGIN) == readme.count(END) == 1, "run python tests/export/families.py"
    assert readme.partition(BEGIN)[2].partition(END)[0] == table(recorded), "run python tests/export/families.py"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_family_is_as_recorded_and_speculates_exactly(
    family: Family, recorded: dict[str, dict[str, str]], tiny_target: Path, tmp_path: Path
):
    family.make(tmp_path / "checkpoint", tiny_target)
    found = outcomes(family, tmp_path / "checkpoint", tmp_path)
    assert {"model_type": family.model_type, **found} == recorded[family.name], "run python tests/export/families.py"
    forms = [form for form, outcome in found.items() if outcome == TAKEN]
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", *forms}, "what is refused leaves nothing behind"
    texts = [_speculates_exactly(tmp_path / form, "lookup" if index else "model") for index, form in enumerate(forms)]
    assert all(text == texts[0] for text in texts), "greedy text is the same in every lowering"


def _speculates_exactly(bundle: Path, drafter: str) -> list[int]:
    """Compares a greedy text with the same behind a draft, in a cache that is rewound between; returns it."""
    generator = Generator.from_bundle(bundle, threads=1, drafter=drafter)
    names = generator.target.spec.names
    assert names.num_logits_to_keep or names.logits_rows, "a prompt's pass computes one row of logits"
    plain = generator.generate(PROMPT, GREEDY, drafter="off")
    session = generator.session()
    drafted, turned, again = (session.generate(prompt, GREEDY, num_draft_tokens=3) for prompt in (PROMPT, TURNED, PROMPT))
    assert drafted.stats.proposed_tokens > 0 or drafter == "lookup"
    assert turned.stats.cached_tokens > 0, "the session rewinds to what the prompts have in common"
    assert turned.token_ids == generator.generate(TURNED, GREEDY, drafter="off").token_ids
    assert plain.token_ids == drafted.token_ids == again.token_ids
    assert len(plain.token_ids) == 24
    assert len(set(plain.token_ids)) > 8, "a text that repeats itself would hide mistakes"
    return plain.token_ids
