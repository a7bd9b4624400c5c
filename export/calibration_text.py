"""What decoders are calibrated on: a text that was given, or what the target writes of its own accord."""

import shutil
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from runtime.contract import DecoderSpec, TokenizerSpec

from .decoders import write_decoder
from .errors import ExportError
from .lowerings import STANDARD_FORMS
from .quantization import BITS
from .role import CALIBRATING, GPTQ, SAMPLING, SEARCH, Report, Role
from .target_samples import sample_tokens
from .tokenizer import TokenizerAssets

TEXT_TOKENS = 128
# With fewer tokens GPTQ fits what happens to stand in them; the paper takes 128 texts of 2048, and what it gains here is
# there with 2,000.
_FEWEST_TEXTS, _MOST_TEXTS = 8, 32
_TOKENS_A_PROMPT = 256
_ROUGH = "rough"


class Calibration:
    """Rounds decoders by GPTQ, both on one text."""

    def __init__(self, text: str | None, tokenizer: TokenizerSpec, folder: Path, report: Report) -> None:
        """Does nothing yet.

        Args:
            text: To calibrate on; None for one that the target writes, once it is needed.
            tokenizer: The target's.
            folder: The bundle's, where the target's tokenizer lies, and its graphs will.
            report: Told what happens.
        """
        self._text, self._tokenizer, self._folder, self._report = text, tokenizer, folder, report

    def applied(self, role: Role, assets: TokenizerAssets, target: DecoderSpec | None) -> Role:
        """Returns a role with its calibrated weights, where it shall have such; else as it is.

        Args:
            role: A decoder that is not written yet.
            assets: Its tokenizer.
            target: The target as it was written; None where the role is the target.

        Raises:
            ExportError: The text is too short, the memory too small, or the checkpoint does not run in torch.
        """
        if role.quantizer != GPTQ:
            return role
        from .calibration import calibrate
        from .packed_checkpoint import unpacked
        from .reference import load_reference

        if self._text is None:
            self._text = self._of_rough_target(role) if target is None else self._written_by(target)
        texts = _texts_of(self._text, assets, role)
        on_matrix = role.counter(CALIBRATING, role.lowerings[0], self._report)
        positive = any(lowering in STANDARD_FORMS for lowering in role.lowerings)
        with unpacked(role.source, self._folder) as source:
            weights = calibrate(
                load_reference(source), texts, BITS[role.precision], role.block_size, on_matrix, positive_scales=positive
            )
        return replace(role, calibrated=weights)

    def _of_rough_target(self, role: Role) -> str:
        """Lets the target write while its weights are rounded each for itself: it needs no better ones for that."""
        self._report(SAMPLING, 0, 0)
        rough = replace(role, name=_ROUGH, quantizer=SEARCH, lowering="gqa")
        try:
            return self._written_by(write_decoder(rough, self._folder, lambda *_: None))
        finally:
            shutil.rmtree(self._folder / _ROUGH, ignore_errors=True)

    def _written_by(self, target: DecoderSpec) -> str:
        tokens = sample_tokens(
            target,
            self._tokenizer,
            self._folder,
            lambda done, total: self._report(SAMPLING, done, total),
            tokens_a_prompt=_TOKENS_A_PROMPT,
            runs_on=True,
        )
        text: str = Tokenizer.from_file(str(self._folder / self._tokenizer.file.path)).decode(tokens)
        return text


def read_calibration_text(path: Path | None) -> str | None:
    """Returns the text that was given; None for what the target writes.

    Raises:
        ExportError: It cannot be read.
    """
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ExportError(f"The text {path} of --calibration-text cannot be read: {reason}.") from error


def _texts_of(text: str, assets: TokenizerAssets, role: Role) -> list[list[int]]:
    """Cuts a text into texts of one length, in the tokens of a role; what is left over at the end is not taken."""
    length = min(TEXT_TOKENS, role.context_length)
    ids = Tokenizer.from_str(assets.tokenizer_json).encode(text, add_special_tokens=False).ids
    texts = [ids[begin : begin + length] for begin in range(0, len(ids) - length + 1, length)]
    if len(texts) < _FEWEST_TEXTS:
        raise ExportError(
            f"The text to calibrate the {role.name} on has {len(ids)} tokens; at least {_FEWEST_TEXTS * length} are needed: "
            "give a longer one with --calibration-text."
        )
    return texts[:_MOST_TEXTS]
