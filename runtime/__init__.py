"""Speculative decoding with numpy and ONNX Runtime: no torch, no transformers, no onnx.

from runtime import Generator, SamplingParams

generator = Generator.from_bundle("bundles/smollm2")
for piece in generator.stream("Explain tides.", SamplingParams(max_new_tokens=128)):
    print(piece.text, end="", flush=True)
"""

from .chat import Chat
from .cuda_options import CudaOptions
from .errors import BundleError, DeviceError, LogitsError, PromptError, SamplingError, SpecError
from .generation import GenerationResult, Piece
from .generator import Generator
from .logprobs import TokenLogprob
from .sampling_params import SamplingParams
from .session import Session
from .stats import GenerationStats

__all__ = [
    "BundleError",
    "Chat",
    "CudaOptions",
    "DeviceError",
    "GenerationResult",
    "GenerationStats",
    "Generator",
    "LogitsError",
    "Piece",
    "PromptError",
    "SamplingError",
    "SamplingParams",
    "Session",
    "SpecError",
    "TokenLogprob",
]
