"""Who may import whom, what a generation loads, and that the package runs where nothing else is installed."""

import ast
import os
import shutil
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "mobius", "tensorrt", "gguf", "safetensors")
# What a package's modules may import of the project itself; "export" may reach the runtime to check what it made.
ALLOWED = {"runtime": {"runtime"}, "export": {"export", "runtime"}, "engines": {"engines", "runtime"}}
RUNTIME_DEPENDENCIES = {"numpy", "onnxruntime", "tokenizers", "jinja2"}


class WithoutTypeChecking(ast.NodeTransformer):
    """Takes out what only type checkers see: it is never run, so nobody needs it installed."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node.orelse if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else node


def imports_of(file: Path, *, for_type_checkers: bool = True) -> set[str]:
    """Top-level names of everything a file imports, relative imports as the file's own package."""
    names = set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    if not for_type_checkers:
        tree = WithoutTypeChecking().visit(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(file.relative_to(ROOT).parts[0] if node.level else str(node.module).partition(".")[0])
    return names


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_packages_import_downwards_only(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        assert imports_of(file) & set(ALLOWED) <= ALLOWED[package], file.name


def test_the_runtime_imports_its_four_dependencies_and_nothing_else() -> None:
    # The certificate has an extra of its own, and nothing of the runtime imports it.
    files = [file for file in (ROOT / "runtime").rglob("*.py") if file.parent.name != "certificate"]
    found = set().union(*(imports_of(file, for_type_checkers=False) for file in files))
    third_party = {name for name in found if name not in sys.stdlib_module_names and name != "runtime"}
    assert third_party == RUNTIME_DEPENDENCIES


GENERATE = textwrap.dedent(
    """
    import sys
    before = set(sys.modules)
    from runtime import Generator, SamplingParams
    generator = Generator.from_bundle(sys.argv[1])
    for params in (SamplingParams(max_new_tokens=24), SamplingParams(max_new_tokens=24, temperature=0.8, seed=3)):
        result = generator.generate([{"role": "user", "content": "What is 3 + 4?"}], params, drafter="model")
        assert result.stats.draft_passes > 0
        print(list(result.token_ids))
    heavy = sorted({name.partition(".")[0] for name in set(sys.modules) - before} & set(sys.argv[2].split(",")))
    assert not heavy, heavy
    """
)


def run_python(python: Path | str, code: str, *arguments: str, cwd: Path, path: str = "") -> str:
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [str(python), "-c", code, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_whole_generation_loads_nothing_heavy(tiny_bundle: Path, tmp_path: Path) -> None:
    run_python(sys.executable, GENERATE, str(tiny_bundle), ",".join(HEAVY), cwd=tmp_path, path=str(ROOT))


def test_the_check_above_sees_a_heavy_module(tiny_bundle: Path, tmp_path: Path) -> None:
    code = GENERATE.replace("generator = ", "import onnx\ngenerator = ")
    with pytest.raises(AssertionError, match="onnx"):
        run_python(sys.executable, code, str(tiny_bundle), ",".join(HEAVY), cwd=tmp_path, path=str(ROOT))


def test_a_clean_environment_with_only_the_cpu_extra_generates_the_same(tiny_bundle: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("runtime", "export", "engines"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", f"{source}[cpu]"]
    subprocess.run(install, check=True, capture_output=True)
    for module in HEAVY:
        probe = subprocess.run([str(python), "-c", f"import {module}"], capture_output=True, check=False, cwd=tmp_path)
        assert probe.returncode != 0, f"{module} is there: the environment is not clean"
    arguments = (GENERATE, str(tiny_bundle), ",".join(HEAVY))
    clean = run_python(python, *arguments, cwd=tmp_path)
    assert clean == run_python(sys.executable, *arguments, cwd=tmp_path, path=str(ROOT))


def test_import_runtime_is_light(tmp_path: Path) -> None:
    """Counts modules instead of seconds: numpy is the only large package `import runtime` brings."""
    code = "import numpy, sys; before = set(sys.modules); import runtime; print(*sorted(set(sys.modules) - before))"
    loaded = run_python(sys.executable, code, cwd=tmp_path, path=str(ROOT)).split()
    assert "runtime.generator" in loaded
    assert not {name.partition(".")[0] for name in loaded} & {"onnxruntime", "jinja2", *HEAVY}
    assert len(loaded) < 150, len(loaded)
