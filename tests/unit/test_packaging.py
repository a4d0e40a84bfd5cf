"""What an installed cachewarm consists of, and that its requirements can be met."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
GROUPS = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}

# The version that the tests install (scripts/lib/venv.sh): the newest torch would be gigabytes of
# CUDA, so pip is never asked about torch here.
TESTED_TORCH = "2.13.0"
NO_NETWORK = re.compile(
    r"NewConnectionError|Name or service not known|Temporary failure in name resolution"
    r"|Network is unreachable|ConnectTimeoutError"
)


def pip(*args: str) -> subprocess.CompletedProcess[str]:
    """Runs this interpreter's pip, without waiting long for a registry that does not answer."""
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check"]
    env = {**os.environ, "PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "20"}
    return subprocess.run([*command, *args], capture_output=True, text=True, env=env, cwd=ROOT)


def is_installed(requirement: Requirement) -> bool:
    try:
        have = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(have, prereleases=True)


@pytest.mark.parametrize("extra", GROUPS)
def test_every_requirement_has_a_candidate(extra: str) -> None:
    """Each requirement of an extra is met by what is installed here or by a release pip finds."""
    requirements = [Requirement(line) for line in GROUPS[extra]]
    # An installed release that satisfies the range proves it; pip is slow and only asked the rest.
    unproven = [
        str(requirement)
        for requirement in requirements
        if requirement.name != "torch" and not is_installed(requirement)
    ]
    if not unproven:
        return
    # --no-deps: some extras are meant for machines with a GPU and cannot be installed on this one.
    result = pip("install", "--dry-run", "--ignore-installed", "--no-deps", *unproven)
    if result.returncode and NO_NETWORK.search(result.stderr + result.stdout):
        pytest.skip(f"no package registry can be reached, so {unproven} were not looked up")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("extra", [name for name in GROUPS if name in {"torch", "gpu"}])
def test_torch_ranges_admit_the_tested_version(extra: str) -> None:
    """The torch that the tests run with lies in every range that users are given."""
    (torch,) = (r for r in map(Requirement, GROUPS[extra]) if r.name == "torch")
    assert torch.specifier.contains(TESTED_TORCH)


def test_bounds_match_the_generated_stubs() -> None:
    """The oldest grpcio and protobuf allowed are those the committed stubs accept at import."""
    floors = {}
    for requirement in map(Requirement, PROJECT["dependencies"]):
        for specifier in requirement.specifier:
            floors[requirement.name] = specifier.version
    stubs = [path.read_text() for path in (ROOT / "services").glob("*/v1/*_pb2*.py")]
    versions = {
        name: set(re.findall(pattern, "\n".join(stubs)))
        for name, pattern in {
            "protobuf": r"# Protobuf Python Version: (\S+)",
            "grpcio": r"GRPC_GENERATED_VERSION = '(\S+)'",
        }.items()
    }
    assert versions == {name: {floors[name]} for name in versions}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel that this tree builds, as users get it."""
    folder = tmp_path_factory.mktemp("wheel")
    # An isolated build fetches its tools and takes several times as long; it is left to machines
    # where the build needs something that is not here, such as cmake or a compiler.
    isolation = [] if build_requirements() else ["--no-build-isolation"]
    # -O0, because these tests look at what is in the wheel and not at how fast it is.
    debug = "--config-settings=cmake.build-type=Debug"
    result = pip("wheel", "--no-deps", *isolation, debug, "--wheel-dir", str(folder), ".")
    if result.returncode and NO_NETWORK.search(result.stderr + result.stdout):
        pytest.skip("no package registry can be reached, and the build needs tools from one")
    assert result.returncode == 0, result.stderr
    (path,) = folder.glob("cachewarm-*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def build_requirements() -> list[str]:
    """What the build backend asks for beyond what is installed, told by the backend itself."""
    code = "import cachewarm_build as b; print(*b.get_requires_for_build_wheel(), sep='\\n')"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "build_backend")}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=True)
    return result.stdout.split()


def test_wheel_has_every_source_file(wheel: zipfile.ZipFile) -> None:
    """No Python file, stub, py.typed marker or part of the status page is left out of the wheel."""
    sources = {
        path.relative_to(ROOT / "services").as_posix()
        for package in ("engine", "cachewarmd")
        for path in (ROOT / "services" / package).rglob("*")
        if path.suffix in {".py", ".pyi"} or path.name == "py.typed" or path.parent.name == "page"
        if path.is_file()
    }
    assert {"engine/py.typed", "cachewarmd/py.typed"} <= sources
    assert {"engine/v1/engine_pb2_grpc.py", "cachewarmd/v1/control_pb2.pyi"} <= sources
    assert {"cachewarmd/ctl/page/index.html", "cachewarmd/ctl/page/uPlot.LICENSE"} <= sources
    assert sources - set(wheel.namelist()) == set()


def test_wheel_has_only_what_runs(wheel: zipfile.ZipFile) -> None:
    """The wheel holds the two packages and its metadata, and none of the sources in C++."""
    names = wheel.namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"engine", "cachewarmd", f"cachewarm-{PROJECT['version']}.dist-info"}
    assert not [name for name in names if name.endswith((".cpp", ".h"))]


def test_native_module_loads_from_the_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """The extension in the wheel lies in engine.kernels and names this CPU's instruction sets."""
    (member,) = (name for name in wheel.namelist() if name.startswith("engine/kernels/_kernels.c"))
    wheel.extract(member, tmp_path)
    # From its own folder and without site-packages, so that no other build of it is imported.
    code = "import _kernels; print(*_kernels.isas())"
    result = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str((tmp_path / member).parent)},
    )
    assert result.stdout.split()[-1:] == ["portable"], result.stderr


def test_wheel_declares_its_entry_points(wheel: zipfile.ZipFile) -> None:
    """The wheel names the three commands and the default pack plan."""
    (member,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    lines = wheel.read(member).decode().splitlines()
    assert {
        "cachewarm-engine=engine.__main__:main",
        "cachewarmd=cachewarmd.__main__:main",
        "cachewarmd-ctl=cachewarmd.ctl.__main__:main",
        "default=engine.models.packing:plan_for_model_dir",
    } <= {line.replace(" ", "") for line in lines}
