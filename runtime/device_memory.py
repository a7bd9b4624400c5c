"""Whether a pair fits where it is to run: the machine's memory, a GPU's own, or one of each."""

from .backend import device_number
from .contract import DecoderSpec
from .device_forms import form_on
from .draft_vocabulary import DraftVocabulary, draft_length
from .memory import check_fits, free_memory


def free_memory_of(device: str) -> int | None:
    """Returns the bytes that are free where a device computes, or None where that is unknown.

    Args:
        device: "cpu", "cuda:1" and so on. A GPU that shares the machine's memory counts as the machine: its own number leaves
            out what the kernel would give up for it.
    """
    if device == "cpu":
        return free_memory()
    from .cuda_driver import free_device_memory, probe_cuda_driver  # whoever runs on the CPU loads nothing of it

    number, gpus = device_number(device), probe_cuda_driver().gpus
    if number < len(gpus) and not gpus[number].integrated:
        return free_device_memory(number)
    return free_memory()


def check_pair_fits(
    target: DecoderSpec,
    draft: DecoderSpec | None,
    max_length: int,
    devices: tuple[str, str],
    draft_vocabulary: DraftVocabulary | None = None,
) -> None:
    """Refuses a pair that does not fit, before it is loaded.

    Args:
        target: The model whose text is generated.
        draft: The model that proposes, or None.
        max_length: Tokens of prompt and text together.
        devices: Where the target and the draft run.
        draft_vocabulary: The draft's, where it has one of its own.

    Raises:
        DeviceError: See memory.check_fits.
    """
    target = form_on(target, devices[0])
    draft = None if draft is None else form_on(draft, devices[1])
    if draft is None or devices[0] == devices[1]:
        check_fits(target, draft, max_length, free_memory_of(devices[0]), draft_vocabulary)
        return
    check_fits(target, None, max_length, free_memory_of(devices[0]))
    length = min(draft_length(max_length, draft_vocabulary), draft.context_length)
    check_fits(draft, None, length, free_memory_of(devices[1]))
