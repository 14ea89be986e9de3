"""What the part of root's command that runs as another user has of root's: nothing."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.attachable import finish
from tests.support.other_user import (
    NOBODY,
    Shared,
    process_with,
    root_attaches,
    running_as_nobody,
)
from tests.support.processes import wait_until

pytestmark = [pytest.mark.attach, pytest.mark.usefixtures("ptrace")]


_STARTED = ("sgl_aspects.collector", "sgl_aspects.attach.operation")


def test_all_that_the_command_starts_but_the_one_that_stops_threads_is_the_users(
    interpreter: str, folders: Shared
) -> None:
    with running_as_nobody(folders.theirs, interpreter) as program:
        process = root_attaches(program)
        wait_until(lambda: len(dict(_users_of_processes_with(*_STARTED))) == len(_STARTED))
        wait_until(lambda: program.states[-1:] == ["woven"])  # those may be another run's
        users = dict(_users_of_processes_with(*_STARTED))
        process.send_signal(signal.SIGINT)
        output = finish(process)
    assert "2 originals are back" in output
    assert set(users.values()) == {(NOBODY,) * 4}


def _users_of_processes_with(*words: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            line = status.with_name("cmdline").read_bytes().decode().split("\0")
            text = status.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        for word in words:
            folder = Path(line[line.index(word) + 1]) if word in line else Path("/")
            if folder.exists() and folder.stat().st_uid == NOBODY:
                users = re.search(r"^Uid:\t(.*)$", text, re.MULTILINE)
                assert users is not None
                yield word, tuple(map(int, users[1].split()))


def test_the_users_part_has_nothing_of_roots(
    interpreter: str, folders: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_ROOTS", "secret")
    with running_as_nobody(folders.theirs, interpreter) as program:
        process = root_attaches(program, folder=folders.ours)
        wait_until(lambda: program.states[-1:] == ["woven"])
        part = Path(f"/proc/{process_with('sgl_aspects.cli.as_owner', str(program.id))}")
        assert os.readlink(part / "cwd") == "/"
        assert b"OF_ROOTS" not in (part / "environ").read_bytes()
        opened = {os.readlink(each) for each in (part / "fd").iterdir()}
        assert not [each for each in opened if not re.match(r"/dev/null|pipe:|socket:|/dev/shm/sgl-", each)]
        assert os.getsid(int(part.name)) == int(part.name)  # no terminal of root's
        status = dict(line.split(":\t", 1) for line in (part / "status").read_text().splitlines())
        assert status["NoNewPrivs"] == "1"
        assert {status[f"Cap{which}"] for which in ("Inh", "Prm", "Eff", "Amb")} == {"0" * 16}
        process.send_signal(signal.SIGINT)
        finish(process)


def test_the_users_part_has_no_limit_or_priority_of_roots(interpreter: str, folders: Shared) -> None:
    program_of_limits = shutil.which("prlimit")
    if program_of_limits is None:
        pytest.skip("setting the program's limits needs util-linux's prlimit")
    prefix = [program_of_limits, "--nofile=150:200", "--core=0:0"]
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with running_as_nobody(folders.theirs, interpreter, prefix=prefix) as program:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, -5)
            process = root_attaches(program)
        finally:
            os.setpriority(os.PRIO_PROCESS, 0, before)
        wait_until(lambda: program.states[-1:] == ["woven"])
        part = process_with("sgl_aspects.cli.as_owner", str(program.id))
        limits = Path(f"/proc/{part}/limits").read_text()
        assert re.search(r"Max open files +\d+ +200 ", limits)
        assert re.search(r"Max core file size +0 +0 ", limits)
        assert os.getpriority(os.PRIO_PROCESS, part) == 0
        process.send_signal(signal.SIGINT)
        assert "2 originals are back" in finish(process)


_IS_KILLED_EARLY = ["sh", "-c", 'echo 300 > /proc/self/oom_score_adj; exec "$@"', "sh"]


def test_the_users_part_is_not_spared_where_memory_runs_out_nor_first_at_the_disk(
    interpreter: str, folders: Shared
) -> None:
    ionice = shutil.which("ionice")
    if ionice is None:
        pytest.skip("setting the class of I/O needs util-linux's ionice")
    path = {"PATH": os.environ["PATH"]}
    with running_as_nobody(folders.theirs, interpreter, prefix=_IS_KILLED_EARLY, environment=path) as program:
        try:
            subprocess.run([ionice, "--class=1", f"--pid={os.getpid()}"], check=True)
            process = root_attaches(program)
        finally:
            subprocess.run([ionice, "--class=0", f"--pid={os.getpid()}"], check=True)
        wait_until(lambda: program.states[-1:] == ["woven"])
        part = process_with("sgl_aspects.cli.as_owner", str(program.id))
        assert Path(f"/proc/{part}/oom_score_adj").read_text() == "300\n"
        assert "realtime" not in subprocess.check_output([ionice, f"--pid={part}"], text=True)
        process.send_signal(signal.SIGINT)
        assert "2 originals are back" in finish(process)
