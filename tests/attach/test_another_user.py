"""Root attaches to a process of another user, who tries to become root by it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_aspects.run import prepared as preparing
from tests.support.attachable import PROGRAM, Program, finish, kill_command, running, span_names
from tests.support.other_user import (
    NOBODY,
    Shared,
    package_folder,
    process_with,
    root_attaches,
    root_command,
    run_as_nobody,
    running_as_nobody,
)
from tests.support.processes import alone_on_this_machine, wait_until

pytestmark = [pytest.mark.attach, pytest.mark.usefixtures("ptrace")]


def test_root_attaches_to_another_users_process(interpreter: str, folders: Shared) -> None:
    with running_as_nobody(folders.theirs, interpreter) as program:
        process = root_attaches(program, "--for=1s")
        output = finish(process)
        assert process.returncode == 0, output
        assert "2 functions woven" in output
        assert "2 originals are back" in output
        assert "spans recorded" in output
        wait_until(lambda: program.states == ["original", "woven", "original"])
    assert {"sell", "wrap"} <= {name.split(".")[-1] for name in span_names(folders.theirs / "spans.jsonl")}
    assert (folders.theirs / "spans.jsonl").stat().st_uid == NOBODY


# Watches for the run's folder, which is known by its name, and makes a link in it. The names are predictable:
# a process's id, the command's, a number.
_PLANT = """
import glob, os, sys, time
program, target, *names = sys.argv[1:]
while True:
    for request in glob.glob(f"/dev/shm/sgl-aspects-*/attach/{program}-*.py"):
        folder = os.path.dirname(os.path.dirname(request))
        key = os.path.basename(request).rpartition("-")[0]
        for name in names:
            path = os.path.join(folder, name.replace("KEY", key))
            try:
                os.symlink(target, path + ".planted")
                os.rename(path + ".planted", path)
            except OSError:
                pass
    time.sleep(0.0005)
"""

_PLANTED = {
    "a script": [f"attach/KEY-{number}.py" for number in range(2, 4)],
    "a request": [f"attach/KEY-{number}.request" for number in range(2, 4)],
    "the collector's lock": ["collector.lock"],
    "the mark of the end": ["closing"],
    "the changes of what is recorded": ["control"],
    "the variables of the collector": ["collector.json"],
    "the processes": ["attach/processes.json"],
}


@pytest.mark.parametrize("what", _PLANTED)
@pytest.mark.parametrize("exists", [True, False], ids=["over a file", "where nothing is"])
def test_a_link_in_the_runs_folder_leads_root_nowhere(
    what: str, exists: bool, interpreter: str, folders: Shared
) -> None:
    precious = folders.ours / "precious"
    if exists:
        precious.write_text("root's")
    with running_as_nobody(folders.theirs, interpreter) as program:
        process = root_attaches(program, "--for=1s")
        planter = run_as_nobody(
            [interpreter, "-I", "-c", _PLANT, str(program.id), str(precious), *_PLANTED[what]]
        )
        try:
            finish(process)
        finally:
            planter.kill()
            planter.wait()
    for folder in _runs_of(program):  # a planted link may have kept the command from removing it
        shutil.rmtree(folder)
    assert precious.exists() == exists
    if exists:
        assert precious.read_text() == "root's"
        status = precious.stat()
        assert (status.st_uid, status.st_gid) == (0, 0)


def test_root_does_not_run_another_users_interpreter(interpreter: str, folders: Shared) -> None:
    mark = folders.theirs / "ran-as"
    own = folders.theirs / "python3"
    shutil.copy(interpreter, own)
    os.chown(own, NOBODY, NOBODY)
    with running_as_nobody(folders.theirs, str(own)) as program:
        assert program.lives(), program.said
        trap = folders.theirs / "trap"
        trap.write_text(f"#!/bin/sh\nid -ru >> {mark}; id -u >> {mark}; exit 1\n")
        trap.chmod(0o755)
        trap.rename(f"{own} (deleted)")
        shutil.copy(f"{own} (deleted)", own.with_name("copy"))
        own.with_name("copy").rename(own)
        finish(root_attaches(program, "--for=0.1s"))
    assert set(mark.read_text().split() if mark.exists() else []) <= {str(NOBODY)}


_SHADOWED = ("json", "signal", "queue", "contextlib", "struct", "dataclasses", "wrapt", "sgl_aspects")


def test_nothing_is_imported_from_the_folder_where_root_stands(interpreter: str, folders: Shared) -> None:
    mark = folders.theirs / "ran-as"
    with running_as_nobody(folders.theirs, interpreter) as program:
        standing = folders.theirs / "standing"
        standing.mkdir()
        for name in _SHADOWED:
            (standing / f"{name}.py").write_text(
                f"import os\nwith open({str(mark)!r}, 'a') as file: print(os.geteuid(), {name!r}, file=file)"
            )
        mark.touch()
        mark.chmod(0o666)
        finish(root_attaches(program, "--for=0.5s", folder=standing))
    assert mark.read_text() == ""


def test_root_does_not_run_what_took_the_place_of_its_own_processs_interpreter(
    interpreter: str, folders: Shared
) -> None:
    """Its folder went, and another user, who may write in the one above, made it again."""
    mark, own = folders.theirs / "ran-as", folders.theirs / "python3"
    shutil.copy(interpreter, own)
    with running(folders.ours, interpreter=str(own)) as program:
        assert program.lives(), program.said
        for trap in (own, own.with_name(f"{own.name} (deleted)")):
            trap.unlink(missing_ok=True)
            trap.write_text(f"#!/bin/sh\nid -u >> {mark}; exit 1\n")
            trap.chmod(0o755)
            os.chown(trap, NOBODY, NOBODY)
        assert "its interpreter" in finish(root_attaches(program, "--for=0.1s"))
        assert program.states == ["original"]
    assert not mark.exists()


# Becomes another user while root is attached to it: a link of that user's could now take the place of its
# control block, and its interpreter be any program of that user's.
_DROPS = """        if os.path.exists("drop") and os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            print("dropped", flush=True)
        if pause:
"""


def test_root_leaves_a_process_alone_that_has_become_another_users(interpreter: str, folders: Shared) -> None:
    source = PROGRAM.replace("        if pause:\n", _DROPS).replace(
        "import os, sys", "import os, signal, sys"
    )
    with running(folders.theirs, source=source, interpreter=interpreter) as program:
        process = root_attaches(program)
        assert process.stdout is not None
        while not process.stdout.readline().startswith("tracing at level"):
            assert process.poll() is None
        (folders.theirs / "drop").touch()
        wait_until(lambda: program.states[-1:] == ["dropped"])
        process.send_signal(signal.SIGINT)
        refused = f"NOT detached: process {program.id} has become user {NOBODY}'s"
        assert any(refused in line for line in process.stdout)  # the run goes on, and may write more
        assert program.lives()
    finish(process)


def test_a_users_command_line_does_not_control_roots_terminal(interpreter: str, folders: Shared) -> None:
    with running_as_nobody(folders.theirs, interpreter, words=["\x1b]0;owned\x07", "\u202e"]) as program:
        for words in (("--dry-run",), ("--for=0.1s",)):
            output = finish(root_attaches(program, *words))
            assert "\\x1b]0;owned\\x07" in output
            assert not [each for each in output if not each.isprintable() and each != "\n"]


def test_kill_9_of_roots_command_or_of_its_users_part_detaches(interpreter: str, folders: Shared) -> None:
    with running_as_nobody(folders.theirs, interpreter) as program:
        for whose in ("sgl_aspects.cli.as_owner", ""):
            process = root_attaches(program)
            wait_until(lambda: program.states[-1:] == ["woven"])
            if whose:
                os.kill(process_with(whose, str(program.id)), signal.SIGKILL)
                finish(process)
            else:
                kill_command(process)
            wait_until(lambda: program.states[-1:] == ["original"])
            assert program.lives()
        wait_until(lambda: not _runs_of(program))


def _runs_of(program: Program) -> set[Path]:
    return {path.parents[1] for path in Path("/dev/shm").glob(f"sgl-aspects-*/attach/{program.id}-*")}


def test_root_detaches_from_another_users_process(interpreter: str, folders: Shared) -> None:
    with running_as_nobody(folders.theirs, interpreter) as program:
        process = root_attaches(program)
        wait_until(lambda: program.states[-1:] == ["woven"])
        assert "2 originals are back" in finish(root_command("detach", str(program.id)))
        assert "spans recorded" in finish(process)


_CHANGES_ITSELF = "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
_KEEPS_ROOT = "import os; os.setresuid(65534, 65534, 0)\n"
_WAITS = "import threading; print('ready', flush=True); threading.Event().wait()"


@pytest.mark.parametrize(
    ("prefix", "source", "reason"),
    [
        (["setpriv", "--inh-caps=+net_raw", "--ambient-caps=+net_raw"], "", "has capabilities"),
        ([], _CHANGES_ITSELF, "does not let user 65534 debug it"),
        ([], _KEEPS_ROOT, "runs with the user ids 65534, 65534, 0, 65534"),
        (["unshare", "--user"], "", "runs in another user namespace"),
    ],
    ids=["a capability", "a change of its user", "a way back to root", "a namespace of its own"],
)
def test_a_process_with_more_rights_than_its_user_is_refused(
    prefix: list[str], source: str, reason: str, interpreter: str, folders: Shared
) -> None:
    program = folders.theirs / "program.py"
    program.write_text(source + _WAITS)
    program.chmod(0o644)
    user = [] if source else ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    words = [*user, *prefix[prefix[:1] == ["setpriv"] :], interpreter, str(program)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env={"PATH": os.environ["PATH"]}) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            output = finish(root_command("attach", str(process.pid), "--force", "--file=/dev/null"))
            assert reason in output
            assert len(output.splitlines()) == 1
        finally:
            process.kill()


@pytest.fixture
def prepared_folder() -> Iterator[Path]:
    folder = Path(preparing.folder_of(NOBODY))
    with alone_on_this_machine():
        shutil.rmtree(folder, ignore_errors=True)
        yield folder
        shutil.rmtree(folder, ignore_errors=True)


def prepared() -> dict[str, str]:
    return {"PYTHONPATH": str(package_folder() / "bootstrap"), preparing.SWITCH: "1"}


def test_root_attaches_to_another_users_prepared_process(
    interpreter: str, folders: Shared, prepared_folder: Path
) -> None:
    with running_as_nobody(folders.theirs, interpreter, environment=prepared()) as program:
        assert "through its control block" in finish(root_attaches(program, "--dry-run"))
        assert "main thread stopped 0.0 ms" in finish(root_attaches(program, "--for=0.2s"))
        wait_until(lambda: program.states == ["original", "woven", "original"])


@pytest.mark.parametrize("is_link", [True, False])
def test_a_process_says_that_another_user_keeps_it_from_being_prepared(
    is_link: bool, interpreter: str, folders: Shared, prepared_folder: Path
) -> None:
    if is_link:
        prepared_folder.symlink_to(folders.theirs)
    else:
        prepared_folder.mkdir(mode=0o700)
    try:
        with running_as_nobody(folders.theirs, interpreter, environment=prepared()) as program:
            wait_until(lambda: "original" in program.states)
            assert f"{prepared_folder} belongs to user 0" in program.said[0]
            assert "with ptrace" in finish(root_attaches(program, "--dry-run"))
    finally:
        if is_link:
            prepared_folder.unlink()
