"""The packages by convention: their wheels, and what they export."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "langchain-conure": ("langchain_conure", "conure.adapters.langchain", "langchain"),
    "llama-index-llms-conure": (
        "llama_index.llms.conure",
        "conure.adapters.llamaindex",
        "llamaindex",
    ),
}


def project_of(folder: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project


@pytest.fixture(scope="module", params=PACKAGES)
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel of a package, built from a copy of its folder."""
    copy: Path = tmp_path_factory.mktemp("package") / request.param
    shutil.copytree(ROOT / "packages" / request.param, copy)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--wheel", "."],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    path: Path
    (path,) = (copy / "dist").glob("*.whl")
    return Path(path)


def test_wheel_holds_one_module_and_shares_its_namespace(wheel: Path) -> None:
    name = wheel.name.split("-")[0].replace("_", "-")
    module, _, _ = PACKAGES[name]
    folder = module.replace(".", "/")
    with zipfile.ZipFile(wheel) as archive:
        files = {each for each in archive.namelist() if ".dist-info/" not in each}
    assert files == {f"{folder}/__init__.py", f"{folder}/py.typed"}


def test_installed_wheel_exports_the_adapter(wheel: Path, tmp_path: Path) -> None:
    name = wheel.name.split("-")[0].replace("_", "-")
    module, adapter, _ = PACKAGES[name]
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    # A namespace package has a part in every folder of the path.
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
        f"import {module} as package, {adapter} as adapter\n"
        "print(sorted(set(adapter.__all__) - set(package.__all__)))\n"
        "print(all(getattr(package, n) is getattr(adapter, n) for n in adapter.__all__))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.stdout.split("\n")[:2] == ["[]", "True"], done.stderr


@pytest.mark.parametrize("name", PACKAGES)
def test_package_requires_this_version_of_conure(name: str) -> None:
    own, conure = project_of(ROOT / "packages" / name), project_of(ROOT)
    assert own["version"] == conure["version"]
    assert own["dependencies"] == [f"conure[{PACKAGES[name][2]}]=={conure['version']}"]
    assert own["requires-python"] == conure["requires-python"]


def test_registered_provider_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "packages" / "langchain-conure"))
    package = importlib.import_module("langchain_conure")
    base = importlib.import_module("langchain.chat_models.base")
    monkeypatch.setattr(base, "_BUILTIN_PROVIDERS", dict(base._BUILTIN_PROVIDERS))
    with pytest.raises(ValueError, match="conure"):
        base.init_chat_model("tiny", model_provider="conure")
    package.register()
    named = base.init_chat_model("conure:tiny", temperature=0, max_tokens=9)
    other = base.init_chat_model("tiny", model_provider="conure", temperature=0, max_tokens=9)
    assert isinstance(named, package.ChatConure)
    assert (named.model, named.temperature, named.max_tokens) == ("tiny", 0, 9)
    assert named == other
    with pytest.raises(ValueError, match="did you mean `temperature`"):
        base.init_chat_model("conure:tiny", temprature=0)


@pytest.mark.parametrize("name", PACKAGES)
def test_readme_installs_conure_from_the_checkout(name: str) -> None:
    _, _, extra = PACKAGES[name]
    readme = (ROOT / "packages" / name / "README.md").read_text("utf-8")
    assert f"pip install '.[{extra}]' ./packages/{name}" in readme
    assert "pypi.org/project/conure" not in readme
