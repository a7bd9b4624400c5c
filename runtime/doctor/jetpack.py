"""The generations of JetPack: what each brings, and where an ONNX Runtime with kernels for its GPUs comes from.

Versions are those of NVIDIA's release notes and of users' listings of `dpkg -l`; docs/devices.md names the combinations.
"""

from dataclasses import dataclass

from .facts import JetsonFacts


@dataclass(frozen=True)
class JetPack:
    """One generation.

    Attributes:
        name: "JetPack 6.1 or 6.2" for instance.
        python: The Python it ships, for which wheels are built.
        cuda: The CUDA it ships.
        tensorrt: The TensorRT it ships.
        wheel: The command that brings an ONNX Runtime with CUDA for it.
    """

    name: str
    python: str
    cuda: str
    tensorrt: str
    wheel: str


_BUILD = "docker build -f docker/jetpack7.Dockerfile -t specrt ."
_JETPACK_6 = JetPack(
    "JetPack 6.1 or 6.2",
    "3.10",
    "12.6",
    "10.3",
    "pip uninstall -y onnxruntime onnxruntime-gpu && "
    'pip install "onnxruntime-gpu==1.23.*" --index-url $JETSON_AI_LAB/jp6/cu126',
)
_JETPACK_7_0 = JetPack("JetPack 7.0 or 7.1", "3.12", "13.0", "10.13", _BUILD)
_JETPACK_7_2 = JetPack("JetPack 7.2", "3.12", "13.2", "10.16", _BUILD)
_BY_JETSON_LINUX = (((39,), _JETPACK_7_2), ((38,), _JETPACK_7_0), ((36, 4), _JETPACK_6))


def jetpack_of(jetson: JetsonFacts) -> JetPack | None:
    """Returns the generation of a Jetson Linux version; None where it is unknown or older than any that is supported."""
    version = jetson.linux_version
    if version is None:
        return None
    return next((generation for prefix, generation in _BY_JETSON_LINUX if version[: len(prefix)] == prefix), None)
