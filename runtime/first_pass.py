"""One pass of each model that was just loaded: a bundle that cannot run says so then, and not inside a text."""

from .backend import Model
from .decoder import Decoder
from .draft_vocabulary import DraftVocabulary
from .errors import BundleError, DeviceError, LogitsError


def check_pair_runs(target: Model, draft: Model | None, num_tokens: int, draft_vocabulary: DraftVocabulary | None) -> None:
    """Feeds each model the largest token id that a text can bring it.

    Args:
        target: The model whose text is generated.
        draft: The model that proposes, or None.
        num_tokens: Of the tokenizer.
        draft_vocabulary: The draft's, where it has one of its own.

    Raises:
        BundleError: A model fails: the graph does not work as its manifest says, or its embedding has fewer rows than that.
        DeviceError: There is no memory for it.
    """
    _check_runs("target", target, num_tokens - 1)
    if draft is not None:
        own = min(num_tokens, draft.spec.vocab_size) - 1
        _check_runs("draft", draft, own if draft_vocabulary is None else draft_vocabulary.largest_input_id)


def _check_runs(role: str, model: Model, token_id: int) -> None:
    # The smallest cache there can be, so that a pass that writes beyond it is found too.
    decoder = Decoder(model, 1, num_rows=1)
    try:
        decoder.forward([token_id], 1)
    except LogitsError:
        pass  # of a token that no text may ever hold; where one does, the text's own error says so
    except DeviceError as error:
        raise BundleError(
            f"The {role} '{model.spec.source}' fails on token {token_id}, the last one this bundle lets it read: its graph has "
            f"fewer tokens, or does not work as the manifest says (lowering '{model.spec.lowering}', spare_slots "
            f"{model.spec.spare_slots}); export the bundle again ({error})"
        ) from error
