"""What a release is made of: sdist and wheel, the citation, the workflows; as far as it can be
checked without publishing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import mpgrad

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "pages.py"
NOT_SOURCES = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")


def can_build() -> bool:
    """Without the network: what pyproject.toml asks for is installed. (From 70.1 on, setuptools
    needs no `wheel`.)"""
    # a folder "build" is found, too
    there = {each.metadata["Name"] for each in importlib.metadata.distributions()}
    if not {"build", "setuptools"} <= there:
        return False
    version = tuple(map(int, importlib.metadata.version("setuptools").split(".")[:2]))
    return version >= (70, 1) or (
        version >= (68, 0) and importlib.util.find_spec("wheel") is not None
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not can_build(), reason="build and a setuptools that it can use are not installed"
)
def test_build_gives_an_sdist_and_a_pure_wheel_made_from_it(script: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=NOT_SOURCES)
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(tmp_path / "dist"),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    name = f"mpgrad-{mpgrad.__version__}"
    assert {each.name for each in (tmp_path / "dist").iterdir()} == {
        f"{name}.tar.gz",
        f"{name}-py3-none-any.whl",
    }
    with tarfile.open(tmp_path / "dist" / f"{name}.tar.gz") as archive:
        inside = set(archive.getnames())
    assert {
        f"{name}/{each}"
        for each in ("LICENSE", "README.md", "mpgrad/workers/main.py", "mpgrad/py.typed")
    } <= inside
    with zipfile.ZipFile(tmp_path / "dist" / f"{name}-py3-none-any.whl") as wheel:
        assert {"mpgrad/joblib.py", "mpgrad/workers/main.py", "mpgrad/py.typed"} <= set(
            wheel.namelist()
        )
        metadata = wheel.read(f"{name}.dist-info/METADATA").decode()
    assert "Keywords: pytorch" in metadata and "Provides-Extra: joblib" in metadata
    runs_the_first_tutorial(
        script, tmp_path / "dist" / f"{name}-py3-none-any.whl", tmp_path / "environment"
    )


def runs_the_first_tutorial(script: Any, wheel: Path, folder: Path) -> None:
    """In an environment whose mpgrad is the wheel's: from the one of the tests it has torch and the
    like, not the clone."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:  # to install a pure wheel is to unpack it
        archive.extractall(packages)
    # searched after the environment's own folder; .pth files in them, as that of an editable
    # install, are not read
    (packages / "tests.pth").write_text(
        "\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    )
    tutorial = ROOT / "docs" / "tutorials" / "first_loop.md"
    (folder / "page.py").write_text(f"{script.program(tutorial)}\nprint(mpgrad.__file__)\n")
    environment = {**os.environ, "PYTHONPATH": "", "MPLBACKEND": "Agg"}
    ended = subprocess.run(
        [folder / "bin" / "python", "page.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == str(packages / "mpgrad" / "__init__.py")
    assert (folder / "first_loop.png").exists()


@pytest.mark.slow
@pytest.mark.skipif(
    not can_build(), reason="build and a setuptools that it can use are not installed"
)
def test_an_editable_install_is_a_path_that_type_checkers_read(tmp_path: Path) -> None:
    """A line in a .pth file. They do not run the hook by which setuptools finds folders that lie
    elsewhere."""
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=NOT_SOURCES, symlinks=True)
    hook = f"import setuptools.build_meta as backend; backend.build_editable({str(tmp_path)!r})"
    subprocess.run(
        [sys.executable, "-c", hook], cwd=source, check=True, capture_output=True, timeout=120
    )
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as wheel:
        lines = {
            name: wheel.read(name).decode().strip()
            for name in wheel.namelist()
            if ".dist-info/" not in name
        }
    assert lines == {f"__editable__.mpgrad-{mpgrad.__version__}.pth": str(source)}
    assert (source / "mpgrad" / "workers" / "main.py").exists()


@pytest.mark.quick
def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["cff-version"], citation["version"], citation["license"]) == (
        "1.2.0",
        mpgrad.__version__,
        "Apache-2.0",
    )
    assert citation["title"] and citation["authors"] and citation["message"]


@pytest.mark.quick
def test_the_workflows_run_what_there_is() -> None:
    """Files that they name exist."""
    commands: dict[str, str] = {}
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        workflow = yaml.safe_load(file.read_text())
        assert workflow[True] is not None  # "on", as YAML 1.1 reads it
        steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
        commands[file.stem] = "\n".join(step["run"] for step in steps if "run" in step)
    assert set(commands) == {"ci", "matrix", "site"}
    assert ".ci/run" in commands["ci"] and (ROOT / ".ci" / "run").stat().st_mode & 0o100
    assert "-e docs" in commands["site"] and "[testenv:docs]" in (ROOT / "tox.ini").read_text()
    assert "scripts/compatibility.py --only ${{ matrix.environment }}" in commands["matrix"]


# instead of python3, which makes programs that only write down how they were started
STUB = """#!/bin/sh
mkdir -p .venv/bin
for name in mypy pip pytest ruff sphinx-build; do
    printf '#!/bin/sh\necho "%s $*" >> log\n[ "$FAILS" != %s ]\n' $name $name > .venv/bin/$name
    chmod +x .venv/bin/$name
done
"""


@pytest.mark.quick
@pytest.mark.parametrize("fails", ["", "ruff", "mypy", "pytest", "sphinx-build"])
def test_ci_runs_everything_and_says_what_failed(tmp_path: Path, fails: str) -> None:
    shutil.copy(ROOT / "README.md", tmp_path)
    programs = {tmp_path / "bin" / "python3": STUB, tmp_path / ".ci" / "ends": "#!/bin/sh\n"}
    for program, text in programs.items():
        program.parent.mkdir()
        program.write_text(text)
        program.chmod(0o755)
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "FAILS": fails}
    ended = subprocess.run(
        [tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True
    )
    log = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    started = [" ".join(each[:2]) for each in log if each[0] != "pip"]
    linters = ["ruff check", "ruff format", "mypy"]
    if fails in ("ruff", "mypy"):
        linters = linters[: {"ruff": 1, "mypy": 3}[fails]]
    assert started == [*linters, "pytest -n", "sphinx-build -q", "pytest -n"]
    assert [each[-1] for each in log if each[0] == "pip"] == [
        ".[test]",
        "mpgrad[lint]",
        "mpgrad[docs]",
    ]
    assert ended.returncode == {"": 0, "pytest": 2}.get(fails, 1)
    assert ended.stdout.count("failed:") == ended.returncode


@pytest.mark.quick
def test_the_workflow_of_the_matrix_has_its_environments() -> None:
    """It once had others, of which none was documented."""
    command = [sys.executable, str(ROOT / "scripts" / "compatibility.py"), "--list"]
    matrix = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "matrix.yml").read_text())[
        "jobs"
    ].values()
    expected = [
        {"python": re.sub(r"py3(\d+).*", r"3.\1", name), "environment": name} for name in matrix
    ]
    assert job["strategy"]["matrix"]["include"] == expected
    (setup,) = [
        step for step in job["steps"] if step.get("uses", "").startswith("actions/setup-python")
    ]
    assert setup["with"] == {"python-version": "${{ matrix.python }}"}


@pytest.mark.quick
def test_the_versions_of_python_are_those_that_are_tested() -> None:
    said = re.findall(r"Python :: 3\.(\d+)", (ROOT / "setup.cfg").read_text())
    (tested,) = re.findall(r"^env_list = (.+)$", (ROOT / "tox.ini").read_text(), re.MULTILINE)
    assert said and {f"3{each}" for each in said} <= set(re.findall(r"3\d\d", tested))
