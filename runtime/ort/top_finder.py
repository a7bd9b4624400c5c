"""A second, tiny session on the device of a decoder: it reads the logits where a pass has left them, and finds the largest."""

import numpy as np
import onnxruntime as ort

from runtime.errors import DeviceError, first_line
from runtime.top_logits import TopLogits, top_logits_graph

from .forks import keep_in_forks

_OUTPUTS = ("tokens", "values", "totals")
_CUDA = "CUDAExecutionProvider"


class TopFinder:
    """Finds the largest logits of rows in a device's memory. One serves all contexts of a model."""

    def __init__(self, kind: str, number: int, element: type[np.floating], options: ort.SessionOptions) -> None:
        """Makes the session.

        Args:
            kind: Where the logits lie, "cuda" or "cpu".
            number: Which of several devices.
            element: Of the logits, float32 or float16.
            options: Like those of the decoder's own session, as far as threads go.

        Raises:
            DeviceError: ONNX Runtime does not compute it there; the reason is for the model's description.
        """
        self._kind, self._number, self._element = kind, number, element
        cuda = (_CUDA, {"device_id": str(number), "arena_extend_strategy": "kSameAsRequested"})
        provider = cuda if kind == "cuda" else ("CPUExecutionProvider", {})
        if kind == "cuda":  # a node on the CPU would bring the whole rows there
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        graph = top_logits_graph(half=element == np.float16)
        try:
            self._session = ort.InferenceSession(graph, options, providers=[provider], enable_fallback=0)
        except Exception as error:  # ONNX Runtime raises many classes, none of them public
            raise DeviceError(first_line(error)) from error
        keep_in_forks(self._session)
        if (found := self._session.get_providers()[0]) != provider[0]:
            raise DeviceError(f"ONNX Runtime chose {found} and not {provider[0]}")

    def find(self, address: int, rows: int, vocab_size: int, first: int, count: int, temperature: float) -> TopLogits:
        """Finds the largest logits of each row from `first` on.

        Args:
            address: Of the logits, [1, rows, vocab_size], in the device's memory.
            rows: See address.
            vocab_size: Likewise.
            first: Of the rows that are wanted, from 0 on.
            count: How many logits of each.
            temperature: Of the rows' sums.
        """
        binding = self._session.io_binding()
        binding.bind_input("logits", self._kind, self._number, self._element, (1, rows, vocab_size), address)
        numbers = {"first": np.array([first]), "count": np.array([count]), "temperature": np.array([temperature], np.float32)}
        for name, number in numbers.items():  # which must live until it has run
            binding.bind_cpu_input(name, number)
        for name in _OUTPUTS:
            binding.bind_output(name)  # in host memory: this is all that comes back
        self._session.run_with_iobinding(binding)
        tokens, logits, totals = (output[0] for output in binding.copy_outputs_to_cpu())
        return TopLogits(tokens, logits, totals, temperature)
