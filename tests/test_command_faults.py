"""Faults on purpose at the command line, with real commands: signals, full and read-only disks, workers that die."""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pools import tiny_pool, train_here, write_digits
from processes import Child, alive, in_session, wait_until, workers_of

from mia_audit_cli.exits import SIGNALS, leave
from mia_audit_cli.main import app
from shadow_pool.prepare import pool_data
from shadow_pool.store.pool import Pool, open_pool
from shadow_pool.store.repair import verify_pool

RUN = "import sys; from mia_audit_cli.main import main; sys.argv[0] = 'mia-audit'; main()"
MAIN = RUN.replace("main()", "print(flush=True); main()")
INTERRUPTED = "interrupted: what was finished is kept; run the same command again to go on"


def start(*arguments: object, before: Callable[[], object] | None = None) -> subprocess.Popen[str]:
    """``mia-audit ...`` in a session of its own, as in a terminal; ``before`` is called in the new process.

    An empty line comes before all that it prints.
    """
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=before,
    )


def finish(command: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Exit status, and the lines on standard error."""
    _, errors = command.communicate(timeout=300)
    assert "Traceback" not in errors
    return command.returncode, errors.strip().splitlines()


def in_flight(pool: Pool) -> int:
    return len(list(pool.path.glob("arms/*/.*.tmp")))


def check_resumes(pool: Pool) -> None:
    """What is there is sound, training goes on, and nothing is left over. (Equal bytes: test_faults.py.)"""
    assert verify_pool(pool).sound
    train_here(pool, pool_data(pool))
    assert verify_pool(pool, repair=True).sound
    assert not list(pool.path.rglob("*.tmp"))
    assert pool.missing("batch") == []


@pytest.mark.parametrize("how", [pytest.param("Ctrl-C", marks=pytest.mark.slow), "Ctrl-C twice", "SIGTERM"])
def test_an_interrupt_ends_in_one_line_without_workers_and_a_rerun_goes_on(tmp_path: Path, how: str) -> None:
    pool, _ = tiny_pool(tmp_path / "pool", {"n": 8, "arms": ["batch"], "recipe": {"epochs": 50}})
    command = start("train-shadows", "--pool", pool.path, "--workers", 2, "--quiet")
    assert wait_until(lambda: in_flight(pool) > 0)
    workers = workers_of(command.pid)
    assert len(workers) == 2
    if how == "SIGTERM":
        command.terminate()
    else:
        os.killpg(command.pid, signal.SIGINT)
        if how == "Ctrl-C twice":
            time.sleep(0.05)
            if command.poll() is None:
                os.killpg(command.pid, signal.SIGINT)
    status, lines = finish(command)
    assert status == 130
    assert lines == [INTERRUPTED]
    assert wait_until(lambda: not any(map(alive, workers)), timeout=20)
    check_resumes(pool)


def test_ctrl_c_while_the_command_starts_is_no_traceback(tmp_path: Path) -> None:
    pool, _ = tiny_pool(tmp_path / "pool", {"arms": ["batch"], "recipe": {"epochs": 100_000}})
    for seconds in (0.05, 0.8, 2.5):
        command = start("train-shadows", "--pool", pool.path, "--workers", 2, "--quiet")
        assert command.stdout is not None
        command.stdout.readline()
        time.sleep(seconds)
        os.killpg(command.pid, signal.SIGINT)
        status, _ = finish(command)
        assert status in (130, -signal.SIGINT)
        assert wait_until(lambda: not in_session(command.pid), timeout=20)  # noqa: B023
    assert verify_pool(pool).sound


def test_a_command_leaves_no_process_behind_whether_it_fails_early_or_ends_well(tmp_path: Path) -> None:
    """Its workers start before it knows that there is work."""
    pool, data = tiny_pool(tmp_path / "pool", {"n": 6, "arms": ["batch"], "recipe": {"epochs": 1}})
    train_here(pool, data)
    for options, expected in ((["--n", 5], 1), ([], 0)):
        command = start("train-shadows", "--pool", pool.path, "--workers", 2, "--quiet", *options)
        assert wait_until(lambda: len(workers_of(command.pid)) == 2)  # noqa: B023
        status, lines = finish(command)
        assert (status, len(lines)) == (expected, expected)
        assert wait_until(lambda: not in_session(command.pid), timeout=20)  # noqa: B023


def test_standard_output_that_is_full_is_one_line(tmp_path: Path) -> None:
    pool, _ = tiny_pool(tmp_path / "pool", {"n": 6, "arms": ["batch"]})
    for options in ([], ["--json"]):
        with open(tmp_path / "out", "w") as out:
            done = subprocess.run(
                [
                    sys.executable,
                    "-c",
                    RUN,
                    "pool",
                    "info",
                    str(pool.path),
                    *options,
                ],
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
            )
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1


def test_a_terminal_that_is_closed_ends_the_command_and_leaves_nothing_in_shared_memory(tmp_path: Path) -> None:
    x = np.zeros((20_000, 1, 8, 8), np.uint8)
    np.savez(tmp_path / "large.npz", x=x, y=np.arange(len(x)) % 2, id=np.arange(len(x)))
    options = ["--data", tmp_path / "large.npz", "--arch", "lenet", "--arms", "batch", "--n", 4, "--workers", 2]
    command = start("train-shadows", "--pool", tmp_path / "pool", *options, "--quiet")

    def shared() -> list[str]:
        names = [path.name for path in Path("/dev/shm").iterdir()]
        return [name for name in names if re.match(rf"(joblib.*_|sem.loky-){command.pid}[_-]", name)]

    assert wait_until(lambda: len(list((tmp_path / "pool").glob("arms/*/.*.tmp"))) > 0)
    assert {name[:6] for name in shared()} == {"joblib", "sem.lo"}
    os.killpg(command.pid, signal.SIGHUP)
    assert finish(command) == (130, [INTERRUPTED])
    assert wait_until(lambda: not in_session(command.pid) and not shared(), timeout=20)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_streams_may_be_closed(tmp_path: Path, closed: str) -> None:
    pool, _ = tiny_pool(tmp_path / "pool", {"n": 4, "arms": ["batch"], "recipe": {"epochs": 1}})
    program = f'{sys.executable} -c "{RUN}"'
    for options, status in ((f"train-shadows --pool {pool.path} --workers 2", 0), ("report --pool nope", 1)):
        done = subprocess.run(
            ["sh", "-c", f"{program} {options} {closed}"], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == status, done.stderr
        assert "error" not in done.stdout
        assert "Traceback" not in done.stderr
    assert pool.missing("batch") == []


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    pool, _ = tiny_pool(tmp_path / "pool", {"n": 4, "arms": ["batch"]})
    program = f'{sys.executable} -c "{RUN}"'
    for options in ("pool info", "pool info --json"):
        line = f"set -o pipefail; {program} {options.replace('info', f'info {pool.path}')} | true"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("what", ["--version", "--help"])
def test_what_is_not_a_command_says_too_that_standard_output_is_full(what: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", RUN, what],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "error: standard output: OSError: [Errno 28] No space left on device\n"


def test_nothing_interrupts_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr("atexit._run_exitfuncs", lambda: [os.kill(os.getpid(), number) for number in SIGNALS])
    monkeypatch.setattr("shadow_pool.train.workers.kill_workers", lambda: None)
    try:
        leave(3)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended == [3]


def test_options_that_are_wrong_show_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import atexit, sys; from mia_audit_cli.main import main\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        f"sys.argv = ['mia-audit', 'train-shadows', '--pool', {str(tmp_path / 'pool')!r}, '--arms', 'zzz']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "False\n")
    assert done.stderr.startswith("error: unknown arm 'zzz'")


def test_ctrl_c_during_an_import_that_catches_everything_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of torch and NumPy do, which then go on with half a module."""
    (tmp_path / "net_that_catches.py").write_text(
        "import os, signal, time\n\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(1)\nexcept BaseException:\n    pass\n\n"
        "from torch.nn import Flatten as Net\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    source = write_digits(tmp_path / "digits.npz", 120)
    options = ["--pool", tmp_path / "pool", "--data", source, "--arch", "net_that_catches:Net"]
    assert finish(start("train-shadows", *options)) == (130, [INTERRUPTED])


def test_a_full_disk_is_one_line_and_training_resumes_once_there_is_space(tmp_path: Path) -> None:
    pool, _ = tiny_pool(tmp_path / "pool", {"arms": ["batch"]})
    command = start(
        *("train-shadows", "--pool", pool.path, "--workers", 2, "--quiet"),
        before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    status, lines = finish(command)
    assert status == 1
    assert len(lines) == 1
    assert lines[0].startswith("error: OSError: [Errno 27] File too large")
    assert "free space" in lines[0]
    check_resumes(pool)


def commands_without_rights(commands: list[list[object]]) -> list[tuple[int, str]]:
    """Exit status and standard error of each, run in this process by a user who may write nothing."""
    # Everything imports what it needs while it still may read Python's own files, wherever those are.
    call(["pool", "verify", commands[0][2]])
    call(["train-shadows", "--pool", commands[0][2], "--workers", 1])
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    return [call(command) for command in commands]


def call(command: list[object]) -> tuple[int, str]:
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
        try:
            app(list(map(str, command)))
        except SystemExit as exit_:
            return int(exit_.code or 0), errors.getvalue()
    raise AssertionError


def test_a_read_only_pool_is_reported_on_and_training_says_why_it_cannot() -> None:
    base = Path(tempfile.mkdtemp())
    try:
        pool, data = tiny_pool(base / "pool", {"n": 6, "arms": ["batch"], "recipe": {"epochs": 8}})
        train_here(pool, data)
        reading: list[list[object]] = [["pool", "verify", pool.path], ["pool", "info", pool.path]]
        writing: list[list[object]] = [
            ["train-shadows", "--pool", pool.path, "--n", 8, "--workers", 1, "--quiet"],
            ["train-target", "--pool", pool.path, "--out", base / "model.pt", "--quiet"],
        ]
        for path in [base, *base.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        found = Child(commands_without_rights, [*reading, *writing]).result()
        assert [status for status, _ in found] == [0, 0, 1, 1]
        for _, text in found[2:]:
            assert text.startswith("error: PermissionError: [Errno 13] Permission denied")
            assert text.count("\n") == 1
            assert "mend permissions" in text
    finally:
        for path in [base, *base.rglob("*")]:
            path.chmod(0o755)
        shutil.rmtree(base)


def test_a_report_while_training_goes_on_uses_the_finished_models_and_says_how_many(tmp_path: Path) -> None:
    pool, data = tiny_pool(tmp_path / "pool", {"n": 6, "arms": ["batch"], "recipe": {"epochs": 12}})
    train_here(pool, data)
    larger, _ = tiny_pool(tmp_path / "pool", {"n": 400, "recipe": {"epochs": 12}})
    training = start("train-shadows", "--pool", larger.path, "--workers", 1, "--quiet")
    wait_until(lambda: in_flight(larger) > 0)
    status, lines = finish(start("report", "--pool", larger.path, "--out", tmp_path / "audit", "--subsets", "none"))
    assert training.poll() is None
    assert status == 0
    assert any("of 400 models are not trained yet" in line for line in lines), lines
    training.kill()
    training.communicate()


@pytest.mark.slow
def test_a_model_that_kills_its_worker_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def train(model, dataset, seed, device):\n    pass\n")
    pool, data = tiny_pool(tmp_path / "pool", {"n": 6, "arms": ["batch"], "train": f"{own}:train"})
    labels = data.records.label[pool.membership[2]].tolist()
    own.write_text(
        "import os, signal\n\n\n"
        "def train(model, dataset, seed, device):\n"
        f"    if [label for _, label in dataset] == {labels}:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    status, lines = finish(start("train-shadows", "--pool", pool.path, "--workers", 2, "--trust"))
    assert status == 1
    assert "1 of 6 models failed, the first with: its worker died while it trained alone" in lines[-1]
    assert "the others are kept" in lines[-1]
    assert open_pool(pool.path).missing("batch") == [2]
