"""What scripts/doctor.py says of a bundle's TensorRT engines. TensorRT is not imported: versions are the packages'."""

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.doctor.facts import Finding, MachineFacts

_HINDERED = ("tensorrt",)


def engine_findings(folder: Path, facts: "MachineFacts") -> "Iterator[Finding]":
    """Yields whether a bundle has engines for the first GPU and the installed TensorRT, and whether they still fit.

    Args:
        folder: The bundle's; nothing is said of one that cannot be read, or has no engines and needs none.
        facts: What was found on the machine.
    """
    from engines.sidecar import ENGINES, EngineRecord, engine_path, engines_folder, rebuild_command
    from engines.trt_module import MODULES, TensorRTModule
    from runtime.doctor.facts import Finding
    from runtime.errors import SpecError
    from runtime.manifest import read_manifest

    packages = {name: facts.packages.get(name.replace("_", "-")) for name in MODULES}
    module = next((name for name, version in packages.items() if version is not None), None)
    if module is None or not facts.driver.gpus or facts.bundle is None or facts.bundle.trouble is not None:
        return
    gpu, bundle = facts.driver.gpus[0], read_manifest(folder)
    tensorrt = TensorRTModule(module, SimpleNamespace(__version__=packages[module]))
    command = rebuild_command(folder, tensorrt)
    here = engines_folder(folder, tensorrt, gpu.compute_capability)
    if not here.is_dir():
        others = sorted(path.name for path in (folder / ENGINES).glob("*-sm*"))
        sentence = f"{folder} has no engines for {here.name}" + (f", only for {', '.join(others)}." if others else ".")
        yield Finding("engines", "broken" if others else "note", sentence, command, _HINDERED)
        return
    for role, decoder in (("target", bundle.target), ("draft", bundle.draft)):
        if decoder is None:
            continue
        spec = decoder.best_form(tensorrt.lowerings)
        engine = engine_path(here, spec)
        try:
            EngineRecord.load(engine, "build it again").check(engine, spec, tensorrt, gpu.compute_capability, "build it again")
        except SpecError as error:
            yield Finding("engines", "broken", f"{error}.", command, _HINDERED)
        else:
            yield Finding("engines", "works", f"The {role}'s engine fits {gpu.name} and {module} {tensorrt.version}.")
