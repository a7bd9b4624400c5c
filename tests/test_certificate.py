"""The certificate passes a sound pair and fails every broken one; its statistics keep their promises."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runtime.backend import Model
from runtime.certificate.plan import certificate_checks
from runtime.certificate.report import CheckReport, run_check
from runtime.certificate.statistics import chi_square, total_variation
from tests.fakes import FakeContext, FakeModel, fake_generator
from tests.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = 1500


def certify(title: str = "", *, samples: int = SAMPLES, target: Model | None = None) -> list[CheckReport]:
    """The checks, of such a title, of a fake pair whose draft agrees with its target now and then."""
    generator = fake_generator(target or FakeModel(seed=3, sharpness=6), FakeModel(seed=3, sharpness=6, noise=4))
    checks = certificate_checks(
        generator, ["abcab", "dcb"], max_new_tokens=12, max_num_draft_tokens=5, samples=samples, chat=False
    )
    return [run_check(check, lambda: None) for check in checks if title in check.title]


def failures(reports: list[CheckReport]) -> list[str]:
    return [f"{verdict.claim} {verdict.found}" for report in reports for verdict in report.verdicts if not verdict.passed]


def test_a_sound_pair_passes() -> None:
    reports = certify()
    assert failures(reports) == []
    assert len(reports) == 13
    assert all(report.verdicts for report in reports)


@pytest.mark.parametrize(("mutation", "title"), MUTATIONS, ids=lambda value: getattr(value, "__name__", value))
def test_every_fault_is_found(mutation: Mutation, title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    assert failures(certify(title)), mutation.__doc__


class LyingModel:
    """A model that says its lone rows are like any others, and they are not."""

    def __init__(self) -> None:
        self._model = FakeModel(seed=3, sharpness=6, min_rows=2)
        self.spec = replace(self._model.spec, min_rows=1)
        self.engine = self.description = "a fake"

    def open_context(self, capacity: int, max_rows: int) -> FakeContext:
        return self._model.open_context(capacity, max_rows)


def test_a_model_whose_lone_rows_differ_is_found() -> None:
    (report,) = certify("logits of the target", target=LyingModel())
    figures = report.verdicts[0].figures
    assert not report.verdicts[0].passed
    assert 0 < figures["differing_rows"] < figures["rows"]
    assert failures(certify("greedy", target=LyingModel()))


def test_every_check_says_how_long_it_takes() -> None:
    generator = fake_generator(FakeModel(seed=3), FakeModel(seed=3, noise=4))
    for check in certificate_checks(generator, ["abcab"], max_new_tokens=8, max_num_draft_tokens=3, samples=250, chat=False):
        steps = []
        check.run(lambda steps=steps: steps.append(1))
        assert len(steps) == check.steps, check.title


def test_an_error_of_the_pair_is_a_verdict() -> None:
    reports = certify(samples=100, target=FakeModel(seed=3, broken_at=9))
    found = failures(reports)
    assert any("LogitsError" in sentence for sentence in found)


def test_chi_square_rejects_as_often_as_it_says() -> None:
    """1,000 experiments at a level of 5 %: 50 rejections expected, more than 86 with a probability under 1e-6."""
    random = np.random.default_rng(1)
    law = np.array([0.5, 0.25, 0.15, 0.05, 0.04, 0.01])
    p_values = [chi_square(random.multinomial(600, law), law).p_value for _ in range(1000)]
    assert sum(p < 0.05 for p in p_values) <= 86
    assert sum(p < 0.5 for p in p_values) in range(420, 581)


def test_chi_square_knows_other_laws_and_impossible_outcomes() -> None:
    law = np.array([0.5, 0.3, 0.2, 0.0])
    assert chi_square(np.array([500, 300, 200, 0]), law).p_value == 1.0
    assert chi_square(np.array([600, 250, 150, 0]), law).p_value < 1e-6
    assert chi_square(np.array([500, 300, 199, 1]), law).p_value == 0.0
    # An outcome that is rare even with all the others joins the least frequent one.
    rare = chi_square(np.array([990, 5, 5]), np.array([0.99, 0.005, 0.005]))
    assert (rare.degrees, rare.p_value) == (0, 1.0)


def test_total_variation_stays_within_its_limit() -> None:
    random = np.random.default_rng(2)
    law = np.full(27, 1 / 27)
    measured = [total_variation(random.multinomial(500, law), law, 1e-2) for _ in range(500)]
    # Level 1e-2: five expected at most; McDiarmid's bound is far from tight.
    assert sum(found.distance > found.limit for found in measured) <= 5
    shifted = total_variation(np.array([900, 100]), np.array([0.5, 0.5]), 1e-6)
    assert shifted.distance == pytest.approx(0.4)
    assert shifted.distance > shifted.limit


@pytest.fixture(scope="module")
def certified(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("certificate") / "of" / "tiny"
    options = ["--max-new-tokens", "8", "--max-draft-tokens", "3", "--samples", "200", "--out", str(folder), "--chat"]
    done = run_script(tiny_bundle, *options)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def run_script(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "certify.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_script_writes_both_documents(certified: tuple[Path, str]) -> None:
    folder, output = certified
    document = json.loads((folder / "certificate.json").read_text(encoding="utf-8"))
    assert document["passed"] is True
    assert 0 < document["false_alarm"] < 1e-4
    verdicts = [verdict for check in document["checks"] for verdict in check["verdicts"]]
    assert output.count("holds  ") == len(verdicts) > 20
    assert any(path.endswith(".onnx") for path in document["files"])
    assert document["machine"]["onnxruntime"]
    page = (folder / "certificate.html").read_text(encoding="utf-8")
    assert page.count("<svg") == page.count("<figure>") >= 6
    assert all(verdict["claim"].split("'")[0][:40] in page for verdict in verdicts)
    assert sorted(path.name for path in folder.iterdir()) == ["certificate.html", "certificate.json"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--samples", "5"], "--samples is 5; a number from 100 to 10000000 is expected"),
        (["--max-draft-tokens", "65"], "--max-draft-tokens is 65; a number from 1 to 64"),
        (["--prompts", "nowhere.txt"], "The prompts file nowhere.txt cannot be read"),
        (["--prompts", "empty.txt"], "The prompts file empty.txt has no prompt"),
        (["--prompts", "latin.txt"], "The prompts file latin.txt is not UTF-8"),
    ],
)
def test_bad_arguments_get_a_sentence(tmp_path: Path, tiny_bundle: Path, arguments: list[str], sentence: str) -> None:
    (tmp_path / "empty.txt").write_text(" \n\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    command = [sys.executable, str(ROOT / "scripts" / "certify.py"), str(tiny_bundle), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
