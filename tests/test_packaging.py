"""The sdist and the wheel, what runs with the wheel alone, and the versions that pyproject.toml claims."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import decent_dp
from tests.compat import RESULTS, claimed
from tests.helpers import ROOT
from tests.test_docs import blocks, compare


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)


def checked(*command: str | Path, folder: Path) -> str:
    done = run(*command, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist of this tree, and the wheel that pip makes of the sdist."""
    checked(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, folder=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    checked(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", sdist, folder=folder)
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def with_requirements(lines: list[str]) -> set[str]:
    """The distributions that pip installs for these requirements, with those that they require."""
    found: set[str] = set()
    waiting = [(Requirement(line), frozenset({""})) for line in lines]
    seen = set()
    while waiting:
        requirement, extras = waiting.pop()
        key = (requirement.name, frozenset(requirement.extras))
        wanted = requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
        if wanted and key not in seen:
            seen.add(key)
            found.add(requirement.name)
            needs = map(Requirement, metadata.requires(requirement.name) or [])
            waiting += [(need, frozenset(requirement.extras) | {""}) for need in needs]
    return found


def empty_environment(folder: Path, lines: list[str]) -> Path:
    """The Python of a new environment that has these requirements only, as links to what is installed here."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in with_requirements(lines):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    return folder / "bin" / "python"


# What the environment lacks, and what is said then. The last lines of the quick start's process, since torch is loaded there.
_LACKS = """
import importlib.util, sys
assert decent_dp.__file__.startswith(sys.prefix), decent_dp.__file__
for name in ("pytest", "hypothesis", "typer", "rich", "matplotlib", "sklearn", "scipy"):
    assert importlib.util.find_spec(name) is None, name
from decent_dp.tools.plots import figure_class
from decent_dp.tools.sim.datasets import digits
for use in (figure_class, digits):
    try:
        use()
    except ImportError as error:
        print(error)
"""


@pytest.mark.slow
def test_the_wheel_alone_runs_the_quick_start(tmp_path):
    """Without typer, rich, matplotlib and scikit-learn, whose absence is said in one line each."""
    sdist, wheel = build(tmp_path)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"src/decent_dp/py.typed", "tests/conftest.py", "docs/index.md", "Makefile", "LICENSE"} <= names
    assert not [name for name in names if re.search(r"site-packages|__pycache__|^runs/", name)]

    described_in = f"{wheel.name.partition('-py3')[0]}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        described = Parser().parsestr(archive.read(f"{described_in}/METADATA").decode())
    assert "decent_dp/py.typed" in names
    assert {name.partition("/")[0] for name in names} == {"decent_dp", described_in}
    assert {"cli", "plots", "sim", "demo"} <= set(described.get_all("Provides-Extra", []))
    needs = [line for line in described.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {Requirement(line).name for line in needs} == {"torch", "numpy", "safetensors", "pyzmq"}

    python = empty_environment(tmp_path / "environment", needs)
    checked(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, folder=tmp_path)
    quick_start = blocks(ROOT / "README.md", "python")[0].code
    (tmp_path / "train.py").write_text(quick_start + _LACKS)
    *printed, plots, sim = checked(python, "-W", "error", "train.py", folder=tmp_path).splitlines(keepends=True)
    compare("with the wheel alone, README.md", quick_start, "".join(printed))
    assert (tmp_path / "model.pt").is_file()
    assert "matplotlib" in plots
    assert "scikit-learn" in sim
    for command in ((python, "-m", "decent_dp"), (python.with_name("decent-dp"), "plan")):
        done = run(*command, folder=tmp_path)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
        assert "typer and rich" in done.stderr


def test_the_metadata_claims_what_was_run():
    """`make compat` writes its record only when all fast tests pass."""
    record = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert record.keys() == {"oldest", "newest"}
    described = metadata.metadata("decent-dp")
    oldest, newest = (int(record[name]["python"].split(".")[1]) for name in ("oldest", "newest"))
    assert described["Requires-Python"] == f">=3.{oldest}"
    classified = re.findall(r"Python :: 3\.(\d+)", "\n".join(described.get_all("Classifier", [])))
    assert sorted(map(int, classified)) == list(range(oldest, newest + 1))
    ran = {package: Version(version) for package, version in record["oldest"]["packages"].items()}
    assert {package: Version(bound) for package, bound in claimed().items()} == ran
    for name, kept in record.items():
        pins = re.findall(r"^([\w-]+)==(\S+)$", (ROOT / f"constraints-{name}.txt").read_text(encoding="utf-8"), re.MULTILINE)
        assert kept["packages"].items() <= dict(pins).items()
        assert sum(kept["skipped"].values()) < kept["passed"] / 20


def test_the_release_files_agree():
    """One version everywhere; the workflows run targets that exist, and publishing is off."""
    version = metadata.version("decent-dp")
    assert version == decent_dp.__version__
    assert f"\n## [{version}]\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["version"], cited["license"]) == (version, "MIT")
    assert set(re.findall(r"\d+\.\d+\.\d+rc\d+", (ROOT / "README.md").read_text(encoding="utf-8"))) == {version}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    targets |= {"compat-oldest", "compat-newest"}
    found = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / ".github/workflows").glob("*.yml")}
    assert found.keys() == {"tests", "release"}
    for name, workflow in found.items():
        assert workflow["permissions"] == {"contents": "read"}, name
        for job in workflow["jobs"].values():
            makes = [step["run"].split()[1] for step in job["steps"] if step.get("run", "").startswith("make")]
            chosen = {one["target"] for one in job.get("strategy", {}).get("matrix", {}).get("include", [])}
            assert {target for target in makes if "{" not in target and target != "${{"} | chosen <= targets
    assert found["release"]["jobs"]["publish"]["if"] is False
    assert list(found["release"][True]) == ["workflow_dispatch"]  # YAML 1.1 reads "on" as true
