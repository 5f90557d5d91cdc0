"""What a bug report needs: whole on every machine, even where a part is broken."""

import json
import os
from pathlib import Path

import pytest
import torch

import halfulp
from halfulp import environment
from halfulp.environment import _describe, describe_environment, list_environment_lines

PARTS = ["versions", "platform", "processor", "torch", "products", "engines", "cache", "devices", "variables"]


def test_every_part_is_there_and_plain() -> None:
    found = describe_environment()
    assert list(found) == PARTS
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["versions"]["halfulp"] == halfulp.__version__
    assert found["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["torch"]["threads"] == torch.get_num_threads()
    assert found["engines"]["cpu"].startswith("llvm")
    assert not [part for part in found.values() if isinstance(part, dict) and "error" in part]


def test_lines_say_all_of_it() -> None:
    found = describe_environment()
    said = " ".join(f"{what} {here}" for what, here in list_environment_lines(found))
    for value in (*filter(None, found["versions"].values()), *found["processor"]["instructions"]):
        assert value in said
    assert all(len(line) == 2 and all(line) for line in list_environment_lines(found))


def test_a_broken_part_says_why_and_the_rest_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("NVML: driver/library\nversion mismatch")

    monkeypatch.setattr(_describe, "_list_devices", broken)
    monkeypatch.setattr(_describe, "_describe_torch", broken)
    found = describe_environment()
    assert list(found) == PARTS
    assert found["devices"] == {"error": "RuntimeError: NVML: driver/library version mismatch"}
    assert found["versions"]["halfulp"] == halfulp.__version__
    assert ("devices error", "RuntimeError: NVML: driver/library version mismatch") in list(
        list_environment_lines(found)
    )


def test_without_torch(in_bare_process) -> None:
    """An installation whose torch is gone, or too old, still tells what there is."""
    program = """
        import sys
        sys.modules["torch"] = None
        from halfulp.environment import describe_environment
        found = describe_environment()
        assert found["processor"]["cores"] >= 1
        assert found["versions"]["halfulp"]
        for part in ("torch", "products", "devices"):
            assert "torch" in found[part]["error"], found[part]
        print("told")
    """
    assert in_bare_process(program) == "told\n"


@pytest.mark.parametrize("kind", ["file", "missing", "home"])
def test_the_cache_says_whether_it_can_be_written(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    place = {"file": tmp_path / "file" / "cache", "missing": tmp_path / "a" / "b", "home": tmp_path}[kind]
    monkeypatch.setenv("HALFULP_CACHE_DIR", str(place))
    cache = describe_environment()["cache"]
    assert cache["folder"] == str(place)
    assert cache["writable"] is (kind != "file")
    assert ("reason" in cache) is (kind == "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"], "something was left behind"


def test_no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HALFULP_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "USERPROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: (_ for _ in ()).throw(RuntimeError("no home"))))
    assert describe_environment()["cache"] == {"folder": None, "writable": False, "reason": "no home folder"}


def test_variables_that_matter_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_VERBOSE", "0")
    monkeypatch.setenv("MY_TOKEN", "secret")
    found = describe_environment()["variables"]
    assert found["ONEDNN_VERBOSE"] == "0"
    assert "secret" not in json.dumps(describe_environment())


@pytest.mark.parametrize("hip", [None, "6.4"])
def test_devices_have_names_and_engines(hip, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Fast Thing")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert _describe._list_devices() == ["cuda 0: Fast Thing", "cuda 1: Fast Thing"]
    engine = _describe._describe_engines()["cuda"]
    assert ("ROCm" in engine or "triton is not installed" in engine) if hip else engine.startswith(("triton", "refer"))


def test_products_follow_what_switches_instructions_off(in_bare_process) -> None:
    # oneDNN reads its variable once: before it does, in some versions of torch as torch._dynamo is imported.
    program = "from halfulp.environment import describe_environment\nprint(describe_environment()['products'])"
    assert "'bfloat16': 'float32'" in in_bare_process(program, ONEDNN_MAX_CPU_ISA="SSE41")


def test_a_misspelt_wish_for_products_is_said(in_process) -> None:
    program = "from halfulp.environment import describe_environment\nprint(describe_environment()['products'])"
    said = in_process(program, HALFULP_FLOAT32_PRODUCTS="yes")
    assert "HALFULP_FLOAT32_PRODUCTS='yes' is unknown: choose one of auto, always, never" in said


def test_the_package_hands_on_what_it_says() -> None:
    assert environment.describe_processor()
    assert os.cpu_count() is None or environment.count_cores() <= os.cpu_count()
