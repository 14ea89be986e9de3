"""`sgl-aspects run`: hooks in every process of a program without any code for them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_aspects.cli.main import main
from sgl_aspects.tracing import attach
from tests.support.distributions import install
from tests.support.processes import command, error_of, finished, free_port, output_of, python

PROGRAM = """
import multiprocessing, os, subprocess, sys
import victim

def child(queue):
    queue.put(victim.f(1))

class Worker:
    def run(self, queue):
        queue.put(victim.f(1))

if __name__ == "__main__":
    print("main", victim.f(1))
    for method in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        for target in (child, Worker().run, victim.report):
            process = context.Process(target=target, args=(queue,))
            process.start()
            print(method, queue.get())
            process.join()
            assert process.exitcode == 0
    code = "import victim; print('subprocess', victim.f(1))"
    subprocess.run([sys.executable, "-c", code], check=True)
"""

VICTIM = """
def f(x):
    return x
def report(queue):
    queue.put(f(1))
"""

PLUGIN = """
import sgl_aspects as aspects

@aspects.around("victim:f")
def hundred(original_fn, *args, **kwargs):
    return original_fn(*args, **kwargs) + 100

@aspects.around("victim:report")
def same(original_fn, *args, **kwargs):
    return original_fn(*args, **kwargs)

def activate():
    aspects.weave(hundred, same)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a program, its module, and an installed plugin that hooks it."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "victim.py").write_text(VICTIM)
    (tmp_path / "victim_hooks.py").write_text(PLUGIN)
    install(tmp_path, "victim-hooks", "[sgl_aspects.plugins]\nvictim = victim_hooks:activate\n")
    return tmp_path


def sgl_aspects_run(
    site: Path, *program: str, options: tuple[str, ...] = ("--level", "0"), **environment: str
) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(site), **environment}
    return command("run", *options, "--", *program, cwd=site, **environment)


def test_children_of_every_start_method_carry_the_hooks(site: Path) -> None:
    printed = output_of(sgl_aspects_run(site, sys.executable, "program.py"))
    values = [line.split() for line in printed.splitlines()]
    assert len(values) == 1 + 3 * 3 + 1
    assert all(value == "101" for _, value in values), printed


def test_no_variable_that_an_engine_takes_for_its_own_reaches_the_program(site: Path) -> None:
    """SGLang warns in each process of each variable that begins with SGL_."""
    code = (
        "import os, subprocess, sys\n"
        "print(*(name for name in sorted(os.environ) if 'ASPECTS' in name))\n"
        "if len(sys.argv) == 1: subprocess.run([sys.executable, sys.argv[0], 'child'], check=True)"
    )
    (site / "names.py").write_text(code)
    options = ("--level", "1", "--file", str(site / "spans.jsonl"), "--report", str(site / "reports"))
    environment = {"SGL_ASPECTS_TRACE_KEEP": "0", "SGL_ASPECTS_TRACE": "off"}
    done = sgl_aspects_run(site, sys.executable, "names.py", options=options, **environment)
    asked = {f"ASPECTS_{name}" for name in ("RUN", "REPORT", "TRACE", "TRACE_FILE", "TRACE_KEEP")}
    first, second = (set(line.split()) for line in done.stdout.splitlines())
    assert asked <= first == second, done.stderr
    assert not [name for name in first if name.startswith("SGL_")]


def test_without_run_nothing_is_hooked(site: Path) -> None:
    printed = output_of(python("program.py", cwd=site))
    assert {line.split()[1] for line in printed.splitlines()} == {"1"}


def test_plugins_run_in_the_program_and_not_in_the_collector(site: Path) -> None:
    """One that closes every descriptor, or ends its process, would end the collector as well."""
    (site / "victim_hooks.py").write_text("def activate(): open('activated', 'a').write('x')")
    done = sgl_aspects_run(
        site, sys.executable, "-c", "import victim; victim.f(1)", options=("--file", "spans")
    )
    assert done.returncode == 0, done.stderr
    assert (site / "activated").read_text() == "x"


def test_another_sitecustomize_still_runs(site: Path) -> None:
    (site / "sitecustomize.py").write_text("import builtins\nbuiltins.customised = __file__\n")
    code = "import sys, victim, sitecustomize; print(customised, sitecustomize.__file__, victim.f(1))"
    done = sgl_aspects_run(site, sys.executable, "-c", code)
    own = str(site / "sitecustomize.py")
    assert done.stdout.split() == [own, own, "101"], done.stderr


def test_a_report_that_cannot_be_written_disturbs_no_process(site: Path) -> None:
    done = sgl_aspects_run(site, sys.executable, "program.py", SGL_ASPECTS_REPORT="/dev/null/reports")
    assert {line.split()[1] for line in done.stdout.splitlines()} == {"101"}, done.stderr
    assert set(done.stderr.splitlines()) == {
        "no report of the hooks: SGL_ASPECTS_REPORT=/dev/null/reports: Not a directory"
    }


def test_a_folder_that_is_gone_while_a_child_starts_in_it(site: Path) -> None:
    (site / "program.py").write_text(
        "import os, subprocess, sys, tempfile\n"
        "os.chdir(tempfile.mkdtemp()); os.rmdir(os.getcwd())\n"
        "subprocess.run([sys.executable, '-c', 'import victim; print(victim.f(1))'], check=True)\n"
    )
    done = sgl_aspects_run(site, sys.executable, "program.py")
    assert (done.stdout, done.stderr) == ("101\n", "")


@pytest.mark.parametrize(("options", "status"), [((), 0), (("--file", "x"), 2), (("--report", "x"), 2)])
def test_a_run_in_a_folder_that_is_gone(site: Path, options: tuple[str, ...], status: int) -> None:
    """It is an error, in one line, only where a relative path is named."""
    run = [sys.executable, "-m", "sgl_aspects", "run", "--level", "0", *options, "--", sys.executable]
    script = ["sh", "-c", 'mkdir gone; cd gone; rmdir ../gone; exec "$@"', "-"]
    done = finished(*script, *run, "-c", "print(1)", cwd=site)
    assert (done.returncode, done.stdout) == (status, "" if status else "1\n")
    assert ("current folder was removed" in done.stderr) == bool(status)
    assert "Traceback" not in done.stderr


def test_how_a_program_is_debugged_does_not_concern_its_collector(tmp_path: Path) -> None:
    options = ("--file", str(tmp_path / "spans"), "--summary")
    done = sgl_aspects_run(tmp_path, sys.executable, "-c", "", options=options, PYTHONPROFILEIMPORTTIME="1")
    assert "spans recorded" in done.stderr
    assert "sgl_aspects.tracing.session" in done.stderr
    assert "sgl_aspects.tracing.collect.process" not in done.stderr


@pytest.mark.parametrize("options", ["-I", "-E", "-S", "-u -Bc -I", "-Ic", "-X dev", "-c -I", "-mI"])
def test_options_that_keep_the_hooks_out_are_named(site: Path, options: str) -> None:
    done = sgl_aspects_run(site, sys.executable, *options.split(), "--version")
    is_told = "runs without hooks and tracing" in done.stderr
    assert is_told is (options in ("-I", "-E", "-S", "-Ic"))


def test_the_program_does_not_find_our_folder_on_its_path(site: Path) -> None:
    code = "import sys; print([path for path in sys.path if 'bootstrap' in path])"
    assert sgl_aspects_run(site, sys.executable, "-c", code).stdout == "[]\n"


def test_the_exit_status_is_the_programs_own(site: Path) -> None:
    assert sgl_aspects_run(site, sys.executable, "-c", "raise SystemExit(7)").returncode == 7


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        ((), (), "nothing to run"),
        (("no-such-program",), (), "'no-such-program' is not a program"),
        ((sys.executable, "-V"), ("--report", "/dev/null/reports"), "--report /dev/null/reports: Not a dir"),
        ((sys.executable, "-V"), ("--endpoint", "collector"), "OTLP endpoint 'collector'"),
        ((sys.executable, "-V"), ("--file", ""), "--file is empty"),
    ],
)
def test_what_cannot_run_is_one_line(
    site: Path, program: tuple[str, ...], options: tuple[str, ...], message: str
) -> None:
    assert message in error_of(sgl_aspects_run(site, *program, options=options))


@pytest.mark.parametrize("content", ["", "#!/no/such/interpreter\n", "\x7fELF"])
@pytest.mark.parametrize("options", [("--level", "0"), ("--dormant",)])
def test_a_program_without_an_interpreter_is_one_line(
    content: str, options: tuple[str, ...], site: Path
) -> None:
    program = site / "script"
    program.write_text(content)
    program.chmod(0o755)
    assert f"{program} cannot be run: " in error_of(sgl_aspects_run(site, str(program), options=options))


def test_a_missing_required_hook_stops_the_program_with_its_reason(site: Path) -> None:
    (site / "victim_hooks.py").write_text(PLUGIN.replace('"victim:f"', '"victim:gone", required=True'))
    done = sgl_aspects_run(site, sys.executable, "program.py")
    assert done.returncode != 0
    assert "victim:gone" in done.stderr
    assert "victim_hooks.hundred" in done.stderr
    assert "main" not in done.stdout


def test_hooks_declared_in_a_file_reach_every_process(site: Path) -> None:
    (site / "victim_hooks-1.0.dist-info" / "entry_points.txt").unlink()
    (site / "aspects.toml").write_text(
        '[[hook]]\ntarget = "victim:f"\nhook = "declared:thousand"\ntype = "around"\n'
    )
    (site / "declared.py").write_text(
        "def thousand(original_fn, *a, **k): return original_fn(*a, **k) + 1000\n"
    )
    options = ("--level", "0", "--config", "aspects.toml")
    done = sgl_aspects_run(site, sys.executable, "program.py", options=options)
    assert {line.split()[1] for line in done.stdout.splitlines()} == {"1001"}, done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[hook]]\ntarget = "victim:f"\nhook = "declared:gone"\ntype = "around"', "has no 'gone'"),
        ('[[hook]]\ntarget = "victim:f"\nhook = "json:dumps"\ntype = "round"', "'round'"),
    ],
)
def test_a_fault_in_the_file_stops_the_program_with_one_line(site: Path, text: str, message: str) -> None:
    (site / "aspects.toml").write_text(text)
    (site / "declared.py").touch()
    done = sgl_aspects_run(
        site, sys.executable, "program.py", options=("--level", "0", "--config", "aspects.toml")
    )
    assert done.returncode != 0
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_run_within_a_run_is_one_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a traced program that starts another under `run`, to have its spans in a file."""
    for name in list(os.environ):
        if name.startswith(("OTEL_", "SGL_ASPECTS_", "ASPECTS_")):
            monkeypatch.delenv(name)
    (tmp_path / "program.py").write_text(
        "import time\n"
        "from sgl_aspects.tracing.records import SpanType\n"
        "from sgl_aspects.tracing.session import current\n"
        "session = current()\n"
        "root = session.recorder.new_id()\n"
        "session.recorder.spans(SpanType('inner'))(root, root, 0, time.monotonic_ns(), time.monotonic_ns())\n"
    )
    inner, outer = tmp_path / "inner.jsonl", tmp_path / "outer.jsonl"
    with attach(file=str(outer)):
        output_of(command("run", "--file", inner, "--", sys.executable, tmp_path / "program.py"))
    assert '"inner"' in inner.read_text()
    assert "inner" not in outer.read_text()


@pytest.mark.parametrize(
    ("exporter", "missing"),
    [
        ({}, "opentelemetry.exporter.otlp.proto.http"),
        ({}, "requests"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "google.rpc"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc"),
    ],
)
def test_a_missing_part_of_an_exporter_is_an_error_and_nothing_is_run(
    exporter: dict[str, str],
    missing: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in exporter.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, missing, None)  # as where its package is not installed
    monkeypatch.setattr(os, "execve", lambda *arguments: pytest.fail("the program was run"))
    assert main(["run", "--endpoint", "http://127.0.0.1:1", "--", sys.executable, "-V"]) == 2
    assert f"not installed ({missing}" in capsys.readouterr().err


def test_requests_alone_by_default(tmp_path: Path) -> None:
    """Steps have traces of their own: a backend's list of traces would be full of them."""
    shown = (sys.executable, "-c", "import os; print(os.environ['ASPECTS_TRACE'])")
    for options, level in (((), "1"), (("--level", "3"), "3")):
        done = sgl_aspects_run(tmp_path, *shown, options=(*options, "--file", "x.jsonl"))
        assert done.stdout.split() == [level], done.stderr


def test_the_summary_is_printed_on_request(tmp_path: Path) -> None:
    for options, is_told in (((), False), (("--summary",), True)):
        done = sgl_aspects_run(tmp_path, sys.executable, "-c", "", options=(*options, "--file", "x.jsonl"))
        assert ("0 spans recorded; otlp-json-file: 0 delivered" in done.stderr) is is_told


RECORDS = """
import sys, time
import sgl_aspects.tracing.session
from sgl_aspects.tracing.records import SpanType
recorder = sgl_aspects.tracing.session.current().recorder
for number in range(int(sys.argv[1])):
    root = recorder.new_id()
    recorder.spans(SpanType("work"))(root, root, 0, time.monotonic_ns(), time.monotonic_ns())
    time.sleep(0.02)
"""

LAUNCHER = """
import subprocess, sys
command = ["sh", "-c", 'sleep "$1"; exec "$2" records.py 100', "-", *sys.argv[1:]]
subprocess.Popen(command, start_new_session=True)
"""


@pytest.mark.parametrize("seconds", ["0", "2"])
def test_what_a_launcher_leaves_in_the_background_is_traced_to_its_end(tmp_path: Path, seconds: str) -> None:
    """Also where it starts when the launcher's run has ended."""
    (tmp_path / "records.py").write_text(RECORDS)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    file = tmp_path / "spans.jsonl"
    options = ("--file", str(file))
    done = sgl_aspects_run(tmp_path, sys.executable, "launcher.py", seconds, sys.executable, options=options)
    assert done.returncode == 0, done.stderr
    assert file.read_text().count('"name":"work"') == 100


def test_programs_of_one_command_share_its_files(tmp_path: Path) -> None:
    """At the same time and one after the other; earlier contents are removed."""
    (tmp_path / "records.py").write_text(RECORDS)
    file, timeline = tmp_path / "spans.jsonl", tmp_path / "trace.json"
    for path in (file, timeline):
        path.write_text("of the last time")
    one = f"{shlex.quote(sys.executable)} records.py 10"
    done = sgl_aspects_run(
        tmp_path,
        *("sh", "-c", f"{one} & {one} & wait; {one}"),
        options=("--level", "1"),
        OTEL_TRACES_EXPORTER="otlp-json-file,perfetto",
        SGL_ASPECTS_TRACE_FILE=str(file),
    )
    assert done.returncode == 0, done.stderr
    assert all(json.loads(line) for line in file.read_text().splitlines())
    assert file.read_text().count('"name":"work"') == 30
    events = json.loads(timeline.read_text())
    assert sum(event["name"] == "work" for event in events if event["ph"] == "X") == 30


def test_a_second_program_is_traced_though_the_first_has_the_port_for_metrics(tmp_path: Path) -> None:
    # Each waits for the other: on a busy machine the first could have ended before.
    meets = """
import pathlib
pathlib.Path(sys.argv[2]).touch()
while len([*pathlib.Path().glob("here-*")]) < 2:
    time.sleep(0.01)
"""
    (tmp_path / "records.py").write_text(RECORDS + meets)
    one, file = f"{shlex.quote(sys.executable)} records.py 50 here-", tmp_path / "spans.jsonl"
    options = ("--file", str(file), "--prometheus", str(free_port()))
    done = sgl_aspects_run(tmp_path, "sh", "-c", f"{one}a & {one}b; wait", options=options)
    assert done.returncode == 0, done.stderr
    assert file.read_text().count('"name":"work"') == 100
    assert done.stderr.count("cannot be used") == 1
