"""The planner: predictions from counts by hand, advice in words, and the plan that is kept beside a bundle."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runtime import Generator, SamplingParams
from runtime.errors import BundleError
from runtime.manifest import load_bundle, save_bundle
from runtime.pass_costs import PassCosts
from runtime.plan import Plan, files_of
from runtime.planner import (
    MAX_DRAFT_TOKENS,
    OFF,
    PlayedRound,
    PromptPlan,
    Setting,
    acceptance_by_place,
    advise,
    best_overall,
    chosen_alike,
    lookup_rounds,
    model_rounds,
    plan_prompts,
    plan_steps,
    predicted_speed,
)
from tests.fakes import FakeModel, fake_generator

ROOT = Path(__file__).resolve().parent.parent
COSTS = PassCosts(((1, 0.040), (2, 0.050), (3, 0.060)), ((1, 0.010), (2, 0.012)), 0.0)


PARAMS = SamplingParams(max_new_tokens=40, ignore_eos=True)


def played(*rounds: tuple[int, int]) -> list[PlayedRound]:
    return [PlayedRound(*one) for one in rounds]


def run(generator: Generator, prompt: str, setting: Setting) -> tuple[tuple[int, ...], list[PlayedRound]]:
    rounds = []
    for piece in generator.stream(prompt, PARAMS, drafter=setting.drafter, num_draft_tokens=setting.num_draft_tokens):
        rounds.append(PlayedRound(len(piece.round.proposal.tokens), piece.round.verification.num_accepted))
    return piece.result.token_ids, rounds


@pytest.mark.parametrize("prompt", ["abc", "dcb", "aabaab"])
def test_a_text_played_again_has_the_rounds_it_is_made_of(prompt: str) -> None:
    generator = fake_generator(FakeModel(seed=3, context_length=256), FakeModel(seed=3, noise=2, context_length=256))
    tokens = generator.prompt_tokens(prompt)
    text, single = run(generator, prompt, Setting("model", 1))
    # With one draft token a round, every place is either judged or a bonus; the draft's own texts tell about those.
    alike = chosen_alike(single)
    for place in range(len(text)):
        draft = fake_generator(FakeModel(seed=3, noise=2, context_length=256), None)
        choice = draft.generate([*tokens, *text[:place]], replace(PARAMS, max_new_tokens=1), drafter="off").token_ids[0]
        alike[place] = choice == text[place]
    again = model_rounds(alike, len(text)) | lookup_rounds(tokens, text)
    assert len(again) == 2 * MAX_DRAFT_TOKENS
    for setting, rounds in again.items():
        assert run(generator, prompt, setting) == (text, rounds), setting


def test_what_rounds_tell_about_the_draft() -> None:
    # Two accepted and one refused, the correction in its place; all accepted, with a bonus; nothing proposed.
    assert chosen_alike(played((3, 2), (2, 2), (0, 0))) == [True, True, False, True, True, True, True]


def test_predictions_by_hand() -> None:
    model, lookup = Setting("model", 2), Setting("lookup", 2)
    # The first round reads the prompt and does not count; behind a whole proposal the draft reads two tokens.
    assert predicted_speed(COSTS, model, played((2, 2), (2, 1), (2, 0))) == pytest.approx(3 / (0.060 + 0.022 + 0.060 + 0.020))
    assert predicted_speed(COSTS, lookup, played((2, 2), (1, 1), (0, 0))) == pytest.approx(3 / (0.050 + 0.040))
    slow = replace(COSTS, round_seconds=0.01)
    assert predicted_speed(slow, model, played((0, 0), (1, 1))) == pytest.approx(2 / (0.050 + 0.012 + 0.01))
    assert predicted_speed(COSTS, model, played((2, 2))) is None


def test_acceptance_by_place() -> None:
    assert acceptance_by_place(played((3, 2), (2, 2), (0, 0), (3, 0))) == (0.5, 0.5, 0.0)
    assert acceptance_by_place([]) == ()


MODEL_2, LOOKUP_3 = Setting("model", 2), Setting("lookup", 3)


def plan_of(gain: float, best: Setting = MODEL_2, predicted: float = 1.5) -> PromptPlan:
    return PromptPlan({"model": (0.8, 0.6)}, {OFF: 10.0, best: 10.0 * predicted}, best, 10.0 * gain, 10.0)


def test_it_says_when_speculation_does_not_pay() -> None:
    sentence = advise({"code": plan_of(1.04), "story": plan_of(0.9)})
    assert sentence.startswith("Do not speculate: the best setting of any kind of prompt is 1.04 times as fast")
    assert "model, K = 2, code" in sentence


def test_it_says_what_pays_most() -> None:
    sentence = advise({"story": plan_of(1.1), "code": plan_of(1.6, LOOKUP_3)})
    assert "code: lookup, K = 3 (1.60 times); story: model, K = 2 (1.10 times)" in sentence


def test_a_setting_that_loses_is_not_among_the_fastest() -> None:
    sentence = advise({"story": plan_of(0.95), "code": plan_of(1.6, LOOKUP_3), "list": plan_of(0.9, LOOKUP_3)})
    assert "fixed settings: code: lookup, K = 3 (1.60 times); nothing gains for story, list. One for all" in sentence


def test_plain_decoding_gains_nothing_over_itself_and_an_unsteady_machine_is_seen() -> None:
    plan = PromptPlan({}, {OFF: 10.0}, OFF, 30.0, 10.0)
    assert plan.measured_gain == 1.0
    assert plan.is_steady
    assert not replace(plan, measured_off=13.0).is_steady
    assert not replace(plan, measured_off=7.0).is_steady


def test_one_setting_for_all_counts_kinds_that_lack_it_as_no_gain() -> None:
    plans = {
        "a": plan_of(1, Setting("model", 2), 1.3),
        "b": plan_of(1, Setting("model", 2), 1.3),
        "c": plan_of(1, Setting("lookup", 3), 1.5),
    }
    assert best_overall(plans) == Setting("model", 2)


@pytest.mark.parametrize("draft", [None, FakeModel(seed=3, noise=3)])
def test_a_fake_pair_is_planned(draft: FakeModel | None) -> None:
    generator = fake_generator(FakeModel(seed=3, context_length=256), draft)
    steps: list[int] = []
    costs, plans = plan_prompts(generator, {"one": "abc", "two": "dcb"}, 24, lambda: steps.append(1))
    assert len(steps) == plan_steps(generator, 2)
    assert (costs.draft_by_rows is None) == (draft is None)
    for plan in plans.values():
        assert set(plan.acceptance) == ({"lookup"} if draft is None else {"model", "lookup"})
        assert plan.predicted[plan.best] == max(plan.predicted.values())
        assert plan.measured > 0
        assert plan.measured_off > 0
        assert all(0 <= share <= 1 for shares in plan.acceptance.values() for share in shares)


@pytest.fixture
def folder(tiny_bundle: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, copy)
    return copy


def plan_for(folder: Path, generator: Generator) -> Plan:
    costs = PassCosts(((1, 1.0), (2, 1.5)), ((1, 0.1),), 0.25)
    return Plan(generator.machine(), files_of(load_bundle(folder)), costs, 0.625, "so and so", {"code": {"off": 1.0}})


def test_a_plan_is_found_again(folder: Path) -> None:
    generator = Generator.from_bundle(folder, drafter="model")
    plan = plan_for(folder, generator)
    plan.save(folder)
    assert Plan.load(folder, load_bundle(folder), generator.machine()) == plan
    assert [path.name for path in folder.glob(".*")] == []
    loaded = Generator.from_bundle(folder)
    assert (loaded._pair.costs, loaded._pair.model_prior) == (plan.costs, 0.625)
    assert "plan.json" in loaded.describe()["costs"]


def test_a_plan_of_another_machine_or_other_models_is_not_taken(folder: Path) -> None:
    generator = Generator.from_bundle(folder, drafter="model")
    plan, bundle = plan_for(folder, generator), load_bundle(folder)
    plan.save(folder)
    assert Plan.load(folder, bundle, {**generator.machine(), "cores": "999"}) is None
    assert Plan.load(folder, replace(bundle, draft=None), generator.machine()) is None
    (folder / "plan.json").unlink()
    assert Plan.load(folder, bundle, generator.machine()) is None
    assert "measured" in Generator.from_bundle(folder).describe()["costs"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:40],
        lambda text: "[]",
        lambda text: "[" * 200_000,
        lambda text: text.replace('"costs"', '"prices"'),
        lambda text: text.replace("1.5", "-1.5"),
        lambda text: text.replace("0.25", '"much"'),
        lambda text: text.replace("0.625", "[]"),
        lambda text: text.replace("0.625", "7.5"),
        lambda text: text.replace("0.625", "1" + "0" * 400),
        lambda text: text.replace("1.5", "1e308"),
        lambda text: text.replace("0.25", "1e308"),
        lambda text: json.dumps({**(plan := json.loads(text)), "costs": {**plan["costs"], "draft_by_rows": None}}),
    ],
)
def test_a_damaged_plan_gets_a_sentence(folder: Path, damage: object) -> None:
    plan_for(folder, Generator.from_bundle(folder, drafter="model")).save(folder)
    path = folder / "plan.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(BundleError, match=r"plan\.json is damaged .*: remove it, or run scripts/plan\.py again"):
        Generator.from_bundle(folder)


def test_a_folder_that_cannot_be_written_to_gets_a_sentence(folder: Path, tmp_path: Path) -> None:
    plan = plan_for(folder, Generator.from_bundle(folder, drafter="model"))
    with pytest.raises(BundleError, match="The plan cannot be written to"):
        plan.save(tmp_path / "nowhere")


def run_script(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "plan.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_plot_of_an_unknown_kind_is_refused_before_the_work(folder: Path) -> None:
    done = run_script(folder, "--plot", "plan.foo")
    assert done.returncode == 2
    assert "--plot is plan.foo; a name that ends with .svg, .png or .pdf is expected" in done.stderr
    assert not (folder / "plan.json").exists()


def test_the_script_plans_draws_and_keeps(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("What is 3 + 4?\n\na b c a b c\n")
    plot = tmp_path / "plan.svg"
    done = run_script(folder, "--prompts", tmp_path / "prompts.txt", "--max-new-tokens", 16, "--plot", plot)
    assert done.returncode == 0, done.stderr
    for words in ("milliseconds of a pass by rows", "model: tokens per second predicted by K", "lookup:", "gain predicted"):
        assert words in done.stdout
    document = json.loads((folder / "plan.json").read_text())
    assert list(document["predictions"]) == ["prompt 1", "prompt 2"]
    assert 0 <= document["model_prior"] <= 1
    assert document["advice"] in done.stdout
    assert "<svg" in plot.read_text()
    # The script has one thread pool for all, a service has pools of their own: the plan serves both.
    assert "plan.json" in Generator.from_bundle(folder).describe()["costs"]


def test_bad_arguments_get_a_sentence(folder: Path) -> None:
    done = run_script(folder, "--max-new-tokens", 4)
    assert done.returncode == 2
    assert "--max-new-tokens is 4; at least 16 are needed" in done.stderr


@pytest.mark.parametrize("own", [True, False])
def test_prompts_that_a_short_context_has_no_room_for_are_told_before_the_work(folder: Path, tmp_path: Path, own: bool) -> None:
    bundle = load_bundle(folder)
    save_bundle(replace(bundle, target=replace(bundle.target, context_length=64)))
    (tmp_path / "prompts.txt").write_text("a b\n" + "a b c d " * 20)
    done = run_script(folder, *([] if own else ["--prompts", tmp_path / "prompts.txt"]))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert re.search(
        r"The planner's own prompts need a context of \d+ tokens, and the bundle's holds 64: pass shorter ones, --prompts FILE"
        if own
        else r"The prompt 'prompt 2' has \d+ tokens; with at least 16 new ones it needs a context of \d+, and the bundle's",
        done.stderr,
    )
