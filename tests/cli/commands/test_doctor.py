"""`conure doctor`: each problem is named with its cure."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest

from conure.cli.commands import doctor
from conure.cli.commands.doctor import Finding, Machine
from conure.cli.main import main
from conure.engine.models import builtin, inspection, registry
from conure.engine.runner import control_groups
from conure.engine.runner.control_groups import ControlGroups
from conure.server.listener import PortError
from conure.server.store.database import lock_folder

HEALTHY = Machine(
    has_module=lambda name: True,
    has_driver=True,
    torch_cuda="13.0",
    cuda_error="",
    available_bytes=8 << 30,
    compiler="/usr/bin/c++",
)


def only(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_healthy_machine_has_no_problem(tmp_path: Path) -> None:
    findings = [
        *doctor.check_python(),
        *doctor.check_extras(HEALTHY),
        *doctor.check_gpu(HEALTHY),
        *doctor.check_compiler(HEALTHY),
        *doctor.check_data(tmp_path / "new" / "data"),
    ]
    assert {finding.level for finding in findings} <= {"ok", "note"}


def test_missing_gpu_is_a_note() -> None:
    finding = only(doctor.check_gpu(HEALTHY._replace(has_driver=False, torch_cuda=None)))
    assert finding.level == "note"
    assert "computes on the CPU" in finding.text


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        ({"torch_cuda": None, "cuda_error": "this torch is built without CUDA"}, "CUDA build"),
        ({"cuda_error": "driver too old"}, "update the driver"),
        ({"has_module": lambda name: name != "triton"}, "pip install triton"),
    ],
)
def test_unusable_gpu_names_the_cure(changes: dict[str, object], cure: str) -> None:
    finding = only(doctor.check_gpu(HEALTHY._replace(**changes)))  # type: ignore[arg-type]
    assert finding.level == "problem"
    assert cure in finding.text


def test_missing_packages_name_the_extra() -> None:
    machine = HEALTHY._replace(has_module=lambda name: name != "torch")
    finding = only(doctor.check_extras(machine))
    assert finding == Finding(
        "problem", "packages", "a server needs torch: pip install 'conure[serve]'"
    )


def test_memory_is_read_on_other_systems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "MEMORY_INFO", tmp_path / "missing")
    assert doctor.available_memory() > 1 << 20


def test_memory_of_a_container_is_that_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "membership").write_text("0::/\n")
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    groups = ControlGroups(tmp_path, tmp_path / "membership")
    monkeypatch.setattr(control_groups, "OWN_GROUPS", groups)
    assert doctor.available_memory() == 2000
    (tmp_path / "memory.current").write_text("6000\n")
    assert doctor.available_memory() == 0


def test_missing_compiler_is_a_note() -> None:
    finding = only(doctor.check_compiler(HEALTHY._replace(compiler=None)))
    assert finding.level == "note"
    assert "apt install g++" in finding.text


def test_wrong_name_of_the_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bogus")
    monkeypatch.setattr(doctor, "_torch_cuda", lambda: (None, ""))
    finding = only(
        doctor.check_compiler(doctor.read_machine()._replace(has_prebuilt_kernels=False))
    )
    assert finding.level == "note"
    assert finding.text.startswith("CXX is '/bogus', which is not a program, so ")
    assert finding.text.endswith("; unset or correct it")


def test_prebuilt_kernels_need_no_compiler() -> None:
    finding = only(
        doctor.check_compiler(HEALTHY._replace(compiler=None, has_prebuilt_kernels=True))
    )
    assert finding.level == "ok"


def test_compiler_is_the_one_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "g++"
    own.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert doctor.find_compiler() == str(own)
    monkeypatch.setenv("CXX", "g++ -m64")
    assert doctor.find_compiler() == str(own)
    monkeypatch.setenv("CXX", "missing-compiler")
    assert doctor.find_compiler() is None


BROKEN: dict[str, tuple[dict[str, object], str, str]] = {
    "no GPU": (
        {"has_driver": False, "torch_cuda": None},
        "note     gpu",
        "no NVIDIA driver is loaded, so a server computes on the CPU",
    ),
    "driver without torch CUDA": (
        {"torch_cuda": None, "cuda_error": "this torch is built without CUDA"},
        "problem  gpu",
        "install a CUDA build: pip install --force-reinstall torch",
    ),
    "missing extra": (
        {"has_module": lambda name: name != "uvicorn"},
        "problem  packages",
        "a server needs uvicorn: pip install 'conure[serve]'",
    ),
    "too little memory": (
        {"available_bytes": 1000},
        "problem  model",
        "end other programs, or choose a smaller model",
    ),
    "no compiler": ({"compiler": None}, "note     compiler", "`apt install g++`"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_command_names_cause_and_cure(
    case: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes, subject, cure = BROKEN[case]
    machine = HEALTHY._replace(**changes)  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "read_machine", lambda: machine)
    code = main(["doctor", str(builtin.FOLDER), "--port", "0", "--data", str(tmp_path / "data")])
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith(subject)]
    assert cure in line
    assert code == subject.startswith("problem")


def test_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        finding = only(doctor.check_port("127.0.0.1", port))
    assert finding.level == "problem"
    assert f"conure serve --port {port + 1}" in finding.text


def test_folder_of_a_running_server_is_a_note(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path)
    levels = [only(doctor.check_data(tmp_path, has_server=it)).level for it in (True, False)]
    os.close(lock)
    assert levels == ["note", "problem"]


def test_port_without_permission_is_not_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(host: str, port: int) -> None:
        raise PortError("cannot listen on 127.0.0.1:80: Permission denied", is_in_use=False)

    monkeypatch.setattr(doctor, "bind", refuse)
    finding = only(doctor.check_port("127.0.0.1", 80))
    assert finding.level == "problem"
    assert finding.text.endswith("choose another: conure serve --host 127.0.0.1 --port 8400")


def test_address_of_ipv6_is_written_as_in_a_url() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert f"[::1]:{port}" in only(doctor.check_port("::1", port)).text


def test_port_of_a_conure_server_is_recognized(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    finding = only(doctor.check_port(host, int(port)))
    assert finding.level == "note"
    assert "in use by a Conure server; start a second one with conure serve --port" in finding.text


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--port", "99999"], "port is 99999; it must be between 0 and 65535"),
        (["--port", "-1"], "port is -1; it must be between 0 and 65535"),
        (["--host", "0.0.0.0"], "host '0.0.0.0' is reachable from other machines"),
        (["--data", "/proc/conure"], "cannot use data folder /proc/conure"),
        (["--data", "/proc/version/conure"], "/proc/version is a file; choose another folder"),
    ],
)
def test_settings_that_serve_refuses_are_problems(
    argv: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "read_machine", lambda: HEALTHY)
    usable = ["--port", "0", "--data", str(tmp_path / "data")]
    assert main(["doctor", *usable, *argv]) == 1
    found = capsys.readouterr().out
    (line,) = [line for line in found.splitlines() if line.startswith("problem")]
    assert sentence in line
    assert main(["serve", "--engine", "fake", *usable, *argv]) != 0
    assert sentence in capsys.readouterr().err


def test_data_folder_of_a_running_server_is_named(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path)
    finding = only(doctor.check_data(tmp_path))
    os.close(lock)
    assert finding.level == "problem"
    assert f"in use by another server (process {os.getpid()})" in finding.text
    assert only(doctor.check_data(tmp_path)).level != "problem"


@pytest.mark.parametrize("is_named", [False, True])
def test_folder_in_use_is_a_note_beside_a_server_unless_it_is_named(
    is_named: bool,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "read_machine", lambda: HEALTHY)
    monkeypatch.setattr(doctor, "default_data_folder", lambda: tmp_path)
    lock = lock_folder(tmp_path)
    named = ["--data", str(tmp_path)] if is_named else []
    code = main(["doctor", "--port", url.rpartition(":")[2], *named])
    os.close(lock)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "data folder" in line]
    assert line.startswith("problem" if is_named else "note")
    assert code == is_named


def test_check_of_a_data_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    assert only(doctor.check_data(tmp_path / "new" / "data")).level != "problem"
    assert only(doctor.check_data(tmp_path)).level != "problem"
    assert list(tmp_path.iterdir()) == []


def test_unusable_data_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert "is a file" in only(doctor.check_data(tmp_path / "file" / "data")).text
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    finding = only(doctor.check_data(tmp_path / "data"))
    assert finding.level == "problem"
    assert "cannot be written" in finding.text


def test_model_directory_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(model: Path | str, machine: Machine = HEALTHY) -> Finding:
        return only(doctor.check_model(str(model), machine))

    assert "does not exist" in found("/nowhere").text
    assert "there is no directory" in found("nowhere").text
    assert "is a GGUF file" in found("model.gguf").text
    monkeypatch.setattr(inspection, "downloaded_folder", lambda name: None)
    assert found("org/name").level == "note"
    monkeypatch.setattr(inspection, "downloaded_folder", lambda name: tmp_path)
    assert "is downloaded from the Hub" in found("org/name").text  # an incomplete folder
    monkeypatch.setattr(inspection, "downloaded_folder", lambda name: builtin.FOLDER)
    assert found("org/name").level == "ok"
    assert "has no config.json" in found(tmp_path).text
    assert found(builtin.FOLDER).level == "ok"
    small = HEALTHY._replace(available_bytes=1000)
    assert "choose a smaller model" in found(builtin.FOLDER, small).text
    assert found(builtin.FOLDER, small._replace(free_gpu_bytes=8 << 30)).level == "ok"
    full_gpu = found(builtin.FOLDER, HEALTHY._replace(free_gpu_bytes=1000))
    assert "0.0 GB of GPU memory are available" in full_gpu.text
    copied = shutil.copytree(builtin.FOLDER, tmp_path / "copied")
    shutil.copy(copied / "model.safetensors", copied / "unused.safetensors")
    assert found(copied).text.endswith(found(builtin.FOLDER).text.split(",")[-1])
    bare = HEALTHY._replace(has_module=lambda name: name != "tokenizers")
    assert found(builtin.FOLDER, bare).level == "note"
    for name in (None, *doctor.OWN_MODELS):
        assert list(doctor.check_model(name, HEALTHY)) == []


def test_a_model_without_a_chat_template_is_a_note(tmp_path: Path) -> None:
    model = shutil.copytree(builtin.FOLDER, tmp_path / "model")
    (model / "tokenizer_config.json").write_text("{}")
    found = [*doctor.check_model(str(model), HEALTHY)]
    assert [finding.level for finding in found] == ["ok", "note"]
    assert "has no chat template" in found[1].text


def test_a_float16_model_takes_twice_its_size_on_a_cpu(tmp_path: Path) -> None:
    model = shutil.copytree(builtin.FOLDER, tmp_path / "model")
    size = (model / "model.safetensors").stat().st_size + doctor.MIN_CACHE_BYTES
    machine = HEALTHY._replace(available_bytes=size)
    config = json.loads((model / "config.json").read_text())
    for name, level in (("bfloat16", "ok"), ("float16", "problem")):
        (model / "config.json").write_text(json.dumps({**config, "dtype": name}))
        assert only(doctor.check_model(str(model), machine)).level == level
    on_gpu = machine._replace(free_gpu_bytes=size)
    assert only(doctor.check_model(str(model), on_gpu)).level == "ok"


def test_weights_under_a_name_in_the_config_are_counted(tmp_path: Path) -> None:
    model = shutil.copytree(builtin.FOLDER, tmp_path / "model")
    (model / "model.safetensors").rename(model / "own.safetensors")
    config = json.loads((model / "config.json").read_text())
    config["transformers_weights"] = "own.safetensors"
    (model / "config.json").write_text(json.dumps(config))
    usual = only(doctor.check_model(str(builtin.FOLDER), HEALTHY))
    found = only(doctor.check_model(str(model), HEALTHY))
    assert (found.level, found.text.split(",")[1]) == ("ok", usual.text.split(",")[1])


def test_models_of_the_package_are_those_of_the_registry() -> None:
    assert {registry.BUILTIN, registry.SEEDED} == doctor.OWN_MODELS


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_incomplete_model_directory_is_a_problem(name: str, tmp_path: Path) -> None:
    model = shutil.copytree(builtin.FOLDER, tmp_path / "model")
    (model / name).unlink()
    finding = only(doctor.check_model(str(model), HEALTHY))
    assert finding.level == "problem"
    assert name in finding.text or "has no .safetensors weights" in finding.text


def test_cut_off_weights_are_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "read_machine", lambda: HEALTHY)
    model = shutil.copytree(builtin.FOLDER, tmp_path / "model")
    os.truncate(model / "model.safetensors", 100_000)
    assert main(["doctor", str(model), "--port", "0", "--data", str(tmp_path / "data")]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem")]
    assert "incomplete metadata, file not fully covered" in line
