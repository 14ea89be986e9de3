"""`sgl-aspects preflight`: what a machine lacks for tracing, in a line each, with its cost."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.otlp_receiver import http_receiver
from tests.support.processes import finished, free_port, wait_until_gone


def preflight(*words: str, limit: str = "", **variables: Any) -> subprocess.CompletedProcess[str]:
    asked = [sys.executable, "-m", "sgl_aspects", "preflight", *words]
    if limit:
        asked = ["bash", "-c", f'{limit} && exec "$@"', "bash", *asked]
    return finished(*asked, without=("OTEL_",), **variables)


def line(done: subprocess.CompletedProcess[str], name: str) -> str:
    """The line of a check, and the one below it if something is lacking."""
    lines = done.stdout.splitlines()
    (number,) = [number for number, text in enumerate(lines) if text[6:].startswith(name)]
    return "\n".join(lines[number : number + (2 if lines[number].startswith("lack") else 1)])


def test_a_backend_that_answers_is_no_lack() -> None:
    with http_receiver() as receiver:
        done = preflight("--endpoint", receiver.endpoint)
    assert line(done, "backend").startswith("ok ")
    assert not done.stderr
    assert done.returncode in (0, 1)  # whatever else this machine lacks


def test_a_backend_that_does_not_answer_is_named_with_what_helps() -> None:
    done = preflight("--endpoint", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert line(done, "backend").startswith("lack")
    assert "--file" in line(done, "backend")


def test_a_file_needs_no_backend(tmp_path: Path) -> None:
    done = preflight("--file", str(tmp_path / "spans.jsonl"))
    assert line(done, "backend") == f"ok    {'backend':18}  none; exporters: otlp-json-file"
    assert not (tmp_path / "spans.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--level", "9"), "'9'"),
        (("--file", "/nowhere/spans.jsonl"), "/nowhere/spans.jsonl"),
    ],
)
def test_a_setting_that_cannot_work_is_a_lack_and_the_other_checks_go_on(
    words: tuple[str, ...], error: str
) -> None:
    done = preflight(*words)
    assert done.returncode == 1
    assert error in line(done, "backend")
    assert line(done, "limits")


def test_a_poor_machine() -> None:
    done = preflight("--file", "/dev/null", limit="ulimit -f 1024", SGL_ASPECTS_NATIVE="off")
    assert done.returncode == 1
    assert line(done, "limits").endswith("bursts of spans are lost: ulimit -f unlimited")
    assert line(done, "compiled step path").endswith("a decode step costs 40 to 60 µs more from level 2 on")


# A filter of system calls, as a container's, that refuses ptrace (101 on x86-64).
_SECCOMP = """
import ctypes, os, struct, sys
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 101), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *rule) for rule in rules))
filter = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(rules), ctypes.addressof(code)))
library = ctypes.CDLL(None, use_errno=True)
if library.prctl(38, 1, 0, 0, 0) or library.prctl(22, 2, filter, 0, 0):
    sys.exit(f"no filter: {os.strerror(ctypes.get_errno())}")
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is one of x86-64")
def test_a_filter_of_system_calls_that_refuses_to_attach_is_found() -> None:
    asked = [sys.executable, "-m", "sgl_aspects", "preflight", "--file", "/dev/null"]
    done = finished(sys.executable, "-c", _SECCOMP, *asked)
    if "no filter" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 1
    assert line(done, "attach").startswith("lack")
    assert "docker run --cap-add SYS_PTRACE" in line(done, "attach")


_KILLED = """
import contextlib, os, signal
from sgl_aspects.cli import main, preflight
@contextlib.contextmanager
def stopped(child):
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    yield
preflight.stopped = stopped
main.main(["preflight", "--file", "/dev/null"])
"""


def test_kill_9_while_it_tries_to_attach_leaves_no_process(tmp_path: Path) -> None:
    with open(tmp_path / "output", "w+", encoding="utf-8") as output:
        # not through a pipe, which the process that is left would hold
        killed = subprocess.run([sys.executable, "-c", _KILLED], stdout=output, check=False)
        if killed.returncode != -signal.SIGKILL:
            pytest.skip("this machine is known to refuse ptrace, so that it is not tried")
        output.seek(0)
        wait_until_gone(int(output.read().split()[-1]))


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_root_without_the_capability_is_told_whose_programs_it_may_attach_to() -> None:
    asked = [sys.executable, "-m", "sgl_aspects", "preflight", "--file", "/dev/null"]
    done = finished("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-all", *asked)
    assert "this user that have no more capabilities" in line(done, "attach")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small /dev/shm, which only root may do")
def test_a_containers_shared_memory() -> None:
    small = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    asked = [sys.executable, "-m", "sgl_aspects", "preflight", "--file", "/dev/null"]
    done = finished("unshare", "--mount", "bash", "-c", f'{small} && exec "$@"', "bash", *asked)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"this machine allows no mount namespace: {done.stderr.strip()}")
    assert line(done, "shared memory").startswith("lack")
    assert "room for 8 processes' rings" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts something over /proc, which only root may do")
def test_a_container_without_proc() -> None:
    hidden = 'mount -t tmpfs tmpfs /proc && "$@" preflight --file /dev/null; "$@" attach 1'
    asked = [sys.executable, "-m", "sgl_aspects"]
    done = finished("unshare", "--mount", "bash", "-c", hidden, "bash", *asked)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"this machine allows no mount namespace: {done.stderr.strip()}")
    assert "/proc is not mounted" in line(done, "attach")
    assert "there is no process 1 in /proc, which is not mounted" in done.stderr
