"""The package as users get it: a wheel, an uninstalled checkout, an entry point, data files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _python(code: str, *, cwd: Path, path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, without network and without a build environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("kernl", "patterns", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source / name)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    done = subprocess.run([*command, "--wheel-dir", str(folder), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("kernl-*.whl")
    return built


def test_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"kernl/{path.relative_to(ROOT / 'kernl')}" for path in (ROOT / "kernl").rglob("*.py")}
    expected |= {f"kernl/patterns/{path.relative_to(ROOT / 'patterns')}" for path in (ROOT / "patterns").rglob("*.py")}
    expected |= {f"kernl/runtime/tuned/{path.name}" for path in (ROOT / "kernl/runtime/tuned").glob("*.json")}
    expected |= {"kernl/py.typed", "kernl/data/sentences.txt", "kernl/data/SOURCES.md"}
    assert expected - names == set()
    strangers = [name for name in names if not name.startswith("kernl/") and ".dist-info/" not in name]
    assert strangers == []
    assert any(name.endswith("LICENSE") for name in names) and any(name.endswith("NOTICE") for name in names)


def test_wheel_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    text = archive.read(points).decode()
    assert "kernl = kernl.cli:main" in text and "kernl = kernl.backend:kernl_backend" in text
    (metadata,) = [name for name in archive.namelist() if name.endswith("METADATA")]
    requirements = re.findall(r"^Requires-Dist: (\S+)$", archive.read(metadata).decode(), flags=re.MULTILINE)
    names = {re.split(r"[<>=!~]", requirement)[0] for requirement in requirements}
    assert {"torch", "triton", "transformers", "tabulate", "tqdm"} <= names
    assert "Requires-Python: >=3.10" in archive.read(metadata).decode()


def test_unpacked_wheel_imports_patterns(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import kernl.patterns, kernl.demo; print(kernl.patterns.__file__, len(kernl.demo.load_sentences()))"
    place, count = _python(code, cwd=tmp_path, path=tmp_path).split()
    assert Path(place) == tmp_path / "kernl" / "patterns" / "__init__.py" and int(count) > 150


def test_uninstalled_checkout_imports_patterns(tmp_path: Path) -> None:
    place = _python("import kernl.patterns; print(kernl.patterns.__file__)", cwd=tmp_path, path=ROOT)
    assert Path(place) == ROOT / "patterns" / "__init__.py"


def test_import_is_light(tmp_path: Path) -> None:
    code = "import sys, kernl; print([name for name in ('torch', 'triton', 'transformers') if name in sys.modules])"
    assert _python(code, cwd=tmp_path, path=ROOT) == "[]"


def test_backend_is_found_by_name_once_installed(wheel: Path, tmp_path: Path) -> None:
    """The entry point alone makes `torch.compile(backend="kernl")` work, without importing kernl first."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import torch, warnings; warnings.simplefilter('ignore');"
        "f = torch.compile(lambda x: torch.nn.functional.gelu(x) + 1, backend='kernl');"
        "x = torch.randn(4); print(bool(torch.allclose(f(x), torch.nn.functional.gelu(x) + 1)))"
    )
    assert _python(code, cwd=tmp_path, path=tmp_path) == "True"


def test_packages_are_all_listed() -> None:
    """A new folder with an __init__.py must be added to pyproject.toml, or the wheel would lack it."""
    text = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^packages = \[(.*?)\]", text, flags=re.MULTILINE | re.DOTALL)
    found = {"kernl"} | {
        "kernl." + ".".join(path.parent.relative_to(ROOT / "kernl").parts)
        for path in (ROOT / "kernl").glob("*/**/__init__.py")
    }
    assert set(re.findall(r'"([\w.]+)"', listed)) == found | {"kernl.patterns"}


def test_versions_agree_with_the_doctor() -> None:
    """pyproject.toml and `kernl doctor` must ask for the same versions."""
    from kernl.cli import REQUIRED

    text = (ROOT / "pyproject.toml").read_text()
    for name, (least, below) in REQUIRED.items():
        if least == (0,):
            wanted = name
        else:
            wanted = f"{name}>={'.'.join(map(str, least))}" + (f",<{'.'.join(map(str, below))}" if below else "")
        assert f'"{wanted}"' in text


def test_files_that_are_divided_run_on_both_ends() -> None:
    """Or one half of their tests would never run."""
    named = re.search(r"^TESTS_NEWEST := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert named
    newest = [ROOT / word for word in named[1].split() if word != "\\"]
    marks = re.compile(r"pytest\.mark\.(either_end|many_cases)")
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if marks.search(path.read_text())]
    assert files
    for path in files:
        assert {path, *path.parents} & set(newest), f"{path.name} is not among the Makefile's TESTS_NEWEST"
