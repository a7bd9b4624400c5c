"""The pass behind loading: it reads the last token a text can bring, in the smallest cache; what fails is the bundle."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.contract import FileRecord
from runtime.draft_vocabulary import DraftVocabulary, Spelling
from runtime.errors import BundleError, DeviceError
from runtime.first_pass import check_pair_runs
from runtime.generator import Generator
from tests.fakes import FakeContext, FakeModel


class Embedding(FakeModel):
    """A fake that keeps what it was fed, and whose engine fails on ids from `num_rows` on, as ONNX Runtime does."""

    def __init__(self, num_rows: int, **arguments: int) -> None:
        super().__init__(**arguments)
        self.num_rows = num_rows
        self.fed: list[int] = []

    def open_context(self, capacity: int, max_rows: int) -> FakeContext:
        model = self

        class Context(FakeContext):
            def run(self, token_ids: NDArray[np.int64], past_length: int, num_rows: int) -> NDArray[np.float32]:
                model.fed += set(token_ids.tolist())
                if token_ids.max() >= model.num_rows:
                    raise DeviceError("out of bounds")
                return super().run(token_ids, past_length, num_rows)

        return Context(self, capacity, max_rows)


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


CUT = DraftVocabulary(20, 30, ids(4, 0, 1))
SPELLED = DraftVocabulary(20, 30, ids(4, 0, 1), Spelling.of([(7, 3)] * 20, (11,)))


@pytest.mark.parametrize(
    ("draft_width", "vocabulary", "expected"),
    [(20, None, 15), (9, None, 8), (3, CUT, 19), (3, SPELLED, 11), (3, DraftVocabulary(20, 12, ids(4, 0, 1)), 11)],
    ids=["the target's tokens", "fewer tokens", "ids of the target", "ids of its own", "a narrow embedding"],
)
def test_each_model_reads_the_last_id_that_a_text_can_bring(
    draft_width: int, vocabulary: DraftVocabulary | None, expected: int
) -> None:
    target, draft = Embedding(16, vocab_size=20), Embedding(expected + 1, vocab_size=max(draft_width, expected + 1))
    if vocabulary is None:
        draft = Embedding(expected + 1, vocab_size=draft_width)
    check_pair_runs(target, draft, 16, vocabulary)
    assert (target.fed, draft.fed) == ([15], [expected])
    draft.num_rows = expected
    with pytest.raises(BundleError, match=rf"^The draft 'fake-0' fails on token {expected}, .* \(out of bounds\)$"):
        check_pair_runs(target, draft, 16, vocabulary)
    target.num_rows = 15
    with pytest.raises(BundleError, match=r"^The target 'fake-0' fails on token 15, the last one this bundle lets it read"):
        check_pair_runs(target, None, 16, None)


def test_a_token_without_logits_is_no_fault_of_the_bundle() -> None:
    check_pair_runs(FakeModel(broken_at=0), None, 16, None)


def test_the_cache_is_the_smallest() -> None:
    capacities = []

    class Recording(FakeModel):
        def open_context(self, capacity: int, max_rows: int) -> FakeContext:
            capacities.append(capacity)
            return super().open_context(capacity, max_rows)

    check_pair_runs(Recording(min_rows=5, spare_slots=2), None, 16, None)
    assert capacities == [5 + 2]


@pytest.mark.parametrize(("field", "value"), [("spare_slots", 0), ("lowering", "growing")])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_manifest_that_no_graph_contradicts_fails_at_load(
    tiny_bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], role: str, field: str, value: object
) -> None:
    folder = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    manifest = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
    manifest[role][field] = value
    (folder / "bundle.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(BundleError, match=rf"^The {role} '.*' fails on token 511, .*; export the bundle again \(") as caught:
        Generator.from_bundle(folder, threads=1)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == "", "ONNX Runtime tells it once more"


def test_a_vocabulary_that_reads_more_than_the_embedding_has_fails_at_load(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    spelling = Spelling.of([(token,) for token in range(511)] + [(512,)])
    DraftVocabulary(512, 600, np.arange(512, dtype=np.int32), spelling).save(folder / "draft" / "vocabulary.npz")
    record = FileRecord.of(folder, "draft/vocabulary.npz")
    manifest = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
    manifest["draft_vocabulary"] = {"path": record.path, "size": record.size, "sha256": record.sha256}
    (folder / "bundle.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(BundleError, match=r"^The draft '.*' fails on token 512, the last one this bundle lets it read"):
        Generator.from_bundle(folder, threads=1)
    Generator.from_bundle(folder, threads=1, drafter="lookup")
