"""hecate doctor: what it finds, what it says to do, and its exit code."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hecate.cli import app
from hecate.commands import doctor
from hecate.commands.doctor import Check, all_checks, self_test


def test_every_line_that_is_not_good_says_what_to_do() -> None:
    checks = list(all_checks())
    names = [check.name for check in checks]
    for name in ("Python", "torch", "numpy", "backends", "cores", "limits", "cgroups", "network"):
        assert name in names
    for check in checks:
        assert check.found, check
        assert bool(check.advice) == (check.state != "good"), check


def test_this_machine_can_train() -> None:
    ran = CliRunner().invoke(app, ["doctor", "--no-self-test"])
    assert ran.exit_code == 0, ran.output
    assert "everything that is needed is there" in ran.output


def test_what_is_missing_is_named_and_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    ran = CliRunner().invoke(app, ["doctor", "--no-self-test"])
    assert ran.exit_code == 1
    assert "apt install g++" in ran.output and "2 needed and missing" in ran.output


def test_a_package_that_is_missing_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["no-such-package>=1", "numpy>=999"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    found = {check.name: check for check in doctor._versions()}
    assert found["no-such-package"].state == "bad" and "pip install" in found["no-such-package"].advice
    assert found["numpy"].state == "look" and "numpy>=999" in found["numpy"].advice


def test_a_module_whose_package_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib.metadata, "version", unknown)
    found = {check.name: check for check in doctor._optional()}
    assert (found["tensorboard"].state, found["tensorboard"].found) == ("good", "there, version not known")


@pytest.mark.parametrize(
    ("installed", "state"), [("2.13.0+cpu", "good"), ("2.10.1", "look"), ("2.14.0.dev20260701", "look")]
)
def test_versions(monkeypatch: pytest.MonkeyPatch, installed: str, state: str) -> None:
    lines = ["torch>=2.11,<2.14", "peft>=0.17; extra == 'examples'", "uvloop>=1; python_version < '3'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    monkeypatch.setattr(doctor, "_version_of", lambda name: installed)
    python, *found = doctor._versions()
    assert [(check.name, check.state) for check in found] == [("torch", state)]
    assert python.state == "good" and (">=2.11" in found[0].advice) is (state == "look")


@pytest.mark.parametrize(
    ("ended", "said", "advice"),
    [
        ((None, ""), "no end after 0.2 s", "network"),
        ((1, "x\n[rank0]: RuntimeError: no route\n"), "no route", "torchrun"),
        ((1, ""), "no output", "torchrun"),
    ],
)
def test_a_self_test_without_a_good_end_says_why(
    ended: tuple[int | None, str], said: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "run_ranks", lambda *given, **options: ended)
    check = self_test(0.2)
    assert check.state == "bad" and said in check.found and advice in check.advice


def test_the_command_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Check("two ranks", "bad", "x [y]", "do [this]")
    monkeypatch.setattr(doctor, "self_test", lambda timeout: bad)
    monkeypatch.setattr(doctor, "all_checks", lambda: iter(()))
    ran = CliRunner().invoke(app, ["doctor"])
    assert ran.exit_code == 1 and "do [this]" in ran.output and "x [y]" in ran.output


@pytest.mark.distributed
def test_two_ranks_on_this_machine(tmp_path: Path) -> None:
    check = self_test(200)
    assert check.state == "good", check.found
