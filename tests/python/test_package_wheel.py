# SPDX-License-Identifier: Apache-2.0
"""The wheel in a clean environment, and the source distribution. scripts/test.sh names both."""

import ast
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest
from package_support import ROOT, TINY

import espalier

WHEEL = os.environ.get("ESPALIER_WHEEL")
SDIST = os.environ.get("ESPALIER_SDIST")
needs_wheel = pytest.mark.skipif(not WHEEL, reason="ESPALIER_WHEEL names no wheel; scripts/wheel.sh builds one")
needs_sdist = pytest.mark.skipif(not SDIST, reason="ESPALIER_SDIST names no source distribution; scripts/wheel.sh builds one")


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """A fresh environment with the wheel alone, and a PATH on which there is no compiler."""
    folder = tmp_path_factory.mktemp("clean") / "env"
    venv.create(folder, with_pip=True)
    environment = {"PATH": str(folder / "bin"), "HOME": str(folder), "LD_BIND_NOW": "1"}
    subprocess.run(
        [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", WHEEL],
        env=environment, check=True, timeout=300,
    )  # fmt: skip

    def run(*command, status=0):
        done = subprocess.run(
            [folder / "bin" / command[0], *map(str, command[1:])],
            env=environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        return done.stdout

    run.folder = folder
    return run


@needs_wheel
def test_installs_without_a_compiler(clean):
    out = clean("python", "-c", f"import espalier; print(espalier.Checkpoint({str(TINY)!r}).layout)")
    assert out == "stock\n"
    listed = clean("python", "-m", "pip", "list", "--format=freeze").split()
    assert [line for line in listed if not line.startswith(("pip", "setuptools"))] == [f"espalier=={espalier.__version__}"]


@needs_wheel
def test_command_is_on_the_path(clean):
    assert "executor       cpu" in clean("espalier", "doctor")
    assert espalier.__version__ in clean("espalier", "--version")
    clean("espalier", "inspect", "/absent", status=3)
    assert "ok" in clean("espalier", "verify", TINY, "--layers", "0")


@needs_wheel
def test_runs_without_libraries_of_the_distribution(clean):
    site = next(clean.folder.glob("lib/python3*/site-packages"))
    files = [*site.glob("espalier/_core*.so"), *site.glob("espalier.scripts/espalier"), *site.glob("espalier.libs/*")]
    assert len(files) >= 4
    for file in files:
        listed = subprocess.run(["ldd", file], capture_output=True, text=True, check=True, timeout=60).stdout
        found = re.findall(r"(\S+) => (\S+)", listed)
        ours = [path for name, path in found if re.match(r"lib(simdjson|fmt|crypto|ssl)", name)]
        assert all(pathlib.Path(path).is_relative_to(site) for path in ours), listed
        assert "not found" not in listed and "libmpi" not in listed and "libpython" not in listed


@needs_wheel
def test_missing_extras_have_one_sentence(clean):
    code = "from espalier._extras import need\ntry: need('torch.library', 'torch')\nexcept ImportError as error: print(error)"
    assert clean("python", "-c", code) == "torch is not installed; pip install 'espalier[torch]' brings it\n"


@needs_wheel
def test_what_the_wheel_holds():
    names = zipfile.ZipFile(WHEEL).namelist()
    for wanted in ("espalier/__init__.py", "espalier/py.typed", "espalier/_core.pyi", "espalier/_prepare.py"):
        assert wanted in names
    assert any(re.fullmatch(r"espalier-[0-9.]+\.dist-info/licenses/LICENSE", name) for name in names)
    allowed = r"espalier/|espalier\.libs/|espalier\.scripts/|espalier-[0-9.]+\.(dist-info/|data/(scripts/|$))"
    assert all(re.match(allowed, name) for name in names), names
    assert not [name for name in names if name.endswith((".cc", ".h", ".a"))]
    metadata = zipfile.ZipFile(WHEEL).read(next(n for n in names if n.endswith("/entry_points.txt"))).decode()
    assert "[vllm.general_plugins]\nespalier = espalier.vllm:register" in metadata
    version = sys.version_info[:2]
    tag = "cp312-abi3" if version >= (3, 12) else "cp{0}{1}-cp{0}{1}".format(*version)
    assert f"-{tag}-manylinux_2_" in WHEEL


@needs_sdist
def test_source_distribution_is_whole(tmp_path):
    """CMake finds every source file of the library, the command and the bindings in it."""
    with tarfile.open(SDIST) as archive:
        names = archive.getnames()
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (folder,) = tmp_path.iterdir()
    assert f"{folder.name}/LICENSE" in names
    assert not [name for name in names if name.endswith((".so", ".o")) or "/tests/" in name or "/build/" in name]
    configured = subprocess.run(
        ["cmake", "-S", folder / "python", "-B", tmp_path / "build", "-G", "Ninja", "-DESPALIER_CUDA=OFF",
         f"-DPython_EXECUTABLE={sys.executable}", "-DSKBUILD_SCRIPTS_DIR=bin", f"-Dnanobind_DIR={nanobind_dir()}"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert configured.returncode == 0, configured.stderr


def nanobind_dir():
    import nanobind

    return nanobind.cmake_dir()


def parsed(path):
    """The text of stubs without what CPython adds from 3.12 on to whatever has a buffer."""
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            added = ("__buffer__", "__release_buffer__")
            node.body = [member for member in node.body if getattr(member, "name", None) not in added]
    return ast.unparse(tree)


def test_stubs_are_those_of_the_module(tmp_path):
    pytest.importorskip("nanobind", reason="nanobind is not installed: the stubs are not compared")
    # In a process of its own: pickle leaves members in classes that it has looked at.
    command = [sys.executable, "-m", "nanobind.stubgen", "--quiet", "-m", "espalier._core", "-o", tmp_path / "found.pyi"]
    subprocess.run(command, check=True, timeout=120)
    committed = ROOT / "python" / "espalier" / "_core.pyi"
    assert parsed(committed) == parsed(tmp_path / "found.pyi"), f"{command[1:6]} makes other stubs"


def test_everything_has_a_docstring():
    bare = []
    for kind in vars(espalier._core).values():
        if not isinstance(kind, type):
            continue
        assert kind.__doc__, kind
        for name, member in vars(kind).items():
            if not name.startswith("_") and not getattr(member, "__doc__", None):
                bare.append(f"{kind.__name__}.{name}")
    assert not bare
