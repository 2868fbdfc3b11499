"""The project as a package: what the wheel holds, who imports whom, what the README promises."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

from mia_audit_cli.main import app
from mia_audit_cli.options import _spec_options

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_wheel_holds_exactly_the_three_packages(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"mia_audit", "shadow_pool", "mia_audit_cli"}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    ours = {re.sub("^cli/", "", name) for name in tracked if re.match("(mia_audit|shadow_pool|cli)/", name)}
    assert ours <= set(names)


def test_imports_run_one_way() -> None:
    found = subprocess.run(["lint-imports", "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_an_audit_imports_nothing_slow_that_it_does_without() -> None:
    program = "import sys, mia_audit.audit, mia_audit.report.html; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert {"torch", "matplotlib"} <= set(found)
    assert {"scipy.stats", "sklearn", "opacus", "torchvision", "distributed"} & set(found) == set()


def test_the_top_level_holds_what_it_should() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    tops = {name.split("/")[0] for name in tracked}
    expected = {"pyproject.toml", "README.md", "LICENSE", "mia_audit", "shadow_pool", "cli", "tests", "benchmarks"}
    assert {top for top in tops if not top.startswith(".")} == expected


def test_the_readme_has_the_two_commands_that_set_everything_up() -> None:
    lines = README.splitlines()
    assert sum(line.startswith("python3 -m venv") and line.endswith("mia-audit demo") for line in lines) == 1
    assert sum(line.startswith("python3 -m venv") and line.endswith("pytest") for line in lines) == 1


def test_the_readme_names_every_command() -> None:
    names = {command.name for command in app.registered_commands} | {"pool info", "pool verify"}
    assert [name for name in sorted(names) if f"`mia-audit {name}" not in README] == []


def test_every_key_of_a_spec_that_has_an_option_is_offered_once() -> None:
    offered = list(_spec_options.__annotations__)
    assert len(set(offered)) == len(offered)
    assert {"n", "data", "arch", "arms", "epochs", "seed"} <= set(offered)
