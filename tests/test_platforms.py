"""Nothing in the sources stands on one system without need: what only some have is guarded; text has an encoding."""

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import halfulp

ROOT = Path(halfulp.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# Modules that not every system has; typeshed and the library reference say which.
SOME_MODULES = {
    *("fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty", "winreg", "msvcrt"),
    *("_winapi", "nt", "curses", "crypt", "nis", "spwd", "ossaudiodev"),
}
# Attributes that Windows or macOS lack, module by module.
SOME_NAMES = {
    "os": {
        *("fork", "forkpty", "register_at_fork", "wait", "wait3", "wait4", "waitpid", "waitid", "WNOHANG", "killpg"),
        *("getuid", "geteuid", "getgid", "getegid", "getgroups", "setuid", "setgid", "setsid", "setpgid", "getpgid"),
        *("getsid", "sched_getaffinity", "sched_setaffinity", "sched_yield", "nice", "getpriority", "setpriority"),
        *("uname", "getloadavg", "sysconf", "pathconf", "confstr", "mkfifo", "mknod", "chown", "fchown", "lchown"),
        *("chroot", "fchdir", "openpty", "ttyname", "ctermid", "tcgetpgrp", "posix_fallocate", "posix_fadvise"),
        *("posix_spawn", "pidfd_open", "memfd_create", "sendfile", "splice", "copy_file_range", "getrandom", "statvfs"),
        *("getxattr", "setxattr", "listxattr", "pread", "pwrite", "preadv", "pwritev", "O_CLOEXEC", "O_DIRECT"),
        *("O_NOFOLLOW", "O_SYNC", "O_TMPFILE", "O_BINARY", "startfile", "add_dll_directory", "process_cpu_count"),
        *("sync", "fdatasync", "lockf", "eventfd", "unshare", "setns"),
    },
    "signal": {
        *("SIGKILL", "SIGSTOP", "SIGCONT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGPIPE"),
        *("SIGTSTP", "SIGBUS", "SIGXCPU", "SIGRTMIN", "SIGRTMAX", "alarm", "setitimer", "getitimer", "pause"),
        *("pthread_kill", "pthread_sigmask", "sigwait", "sigtimedwait", "siginterrupt", "CTRL_C_EVENT"),
    },
    "time": {"clock_gettime", "clock_gettime_ns", "tzset", "CLOCK_MONOTONIC", "CLOCK_THREAD_CPUTIME_ID"},
    "socket": {"AF_UNIX", "socketpair", "SO_REUSEPORT"},
    "select": {"poll", "epoll", "kqueue"},
    "mmap": {"MAP_SHARED", "MAP_PRIVATE", "PROT_READ", "PROT_WRITE", "MAP_ANONYMOUS"},
    "subprocess": {"STARTUPINFO", "CREATE_NO_WINDOW", "CREATE_NEW_PROCESS_GROUP"},
    "multiprocessing": {"get_start_method"},
}
# Places on a disk that not every system has, as text.
SOME_PLACES = ("/proc", "/sys/", "/tmp", "/dev/", "/etc/", "/usr/", "/bin/")
# Text files and pipes: their encoding is the system's, and Windows' is not UTF-8, unless it is given.
TEXT_METHODS = {"read_text": 0, "write_text": 1}
# What is left, with its reason: (file, what).
ALLOWED = {
    ("environment/_processor.py", "/proc/cpuinfo"): "read where it is there; other systems are asked by other ways",
}


def _guarded(node: ast.AST, tree: ast.AST) -> bool:
    """Whether an `if` or a conditional expression above asks hasattr for the same name."""
    attribute = node.attr if isinstance(node, ast.Attribute) else ""
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    while node in parents:
        node = parents[node]
        if isinstance(node, ast.If | ast.IfExp):
            asked = [call for call in ast.walk(node.test) if isinstance(call, ast.Call)]
            for call in asked:
                if ast.unparse(call.func) == "hasattr" and ast.literal_eval(call.args[1]) == attribute:
                    return True
    return False


def found_in(text: str) -> list[str]:
    """Everything in a source that not every system has, unguarded, and text without an encoding."""
    tree = ast.parse(text)
    documentation, found = set(), []
    for node in ast.walk(tree):  # what is documented comes before its words
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            if node.body and isinstance(node.body[0], ast.Expr):
                documentation.add(id(node.body[0].value))
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in SOME_MODULES]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = (node.module or "").split(".")[0]
            found += [module] if module in SOME_MODULES else []
            found += [f"{module}.{a.name}" for a in node.names if a.name in SOME_NAMES.get(module, ())]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in SOME_NAMES.get(node.value.id, ()) and not _guarded(node, tree):
                found.append(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            found += [node.value] if node.value.startswith(SOME_PLACES) or node.value in SOME_MODULES else []
        elif isinstance(node, ast.Call):
            found += _without_encoding(node)
    return found


def _without_encoding(call: ast.Call) -> list[str]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in given:
        return []
    if name in TEXT_METHODS:
        return [] if len(call.args) > TEXT_METHODS[name] else [f"{name} without an encoding"]
    if name in ("run", "Popen", "check_output"):
        text = any(key in given for key in ("text", "universal_newlines"))
        return [f"{name} without an encoding"] if text else []
    # open(path, mode) and path.open(mode); the library's own methods of that name take no mode.
    is_method = isinstance(call.func, ast.Attribute)
    if name in ("NamedTemporaryFile", "TemporaryFile", "fdopen") or (name == "open" and not is_method):
        mode = given.get("mode", call.args[1] if len(call.args) > 1 else None)
        binary = "w+b" if name.endswith("TemporaryFile") else "r"
        mode = mode.value if isinstance(mode, ast.Constant) else binary if mode is None else "b"
        return [] if "b" in mode else [f"{name} without an encoding"]
    if name == "open" and is_method and call.args and isinstance(call.args[0], ast.Constant):
        mode = str(call.args[0].value)
        return [f"{name} without an encoding"] if set(mode) <= set("rwax+t") else []
    return []


def test_what_only_some_systems_have_is_guarded() -> None:
    wrong, used = [], set()
    for path in FILES:
        place = path.relative_to(ROOT).as_posix()
        for what in found_in(path.read_text(encoding="utf-8")):
            if (place, what) in ALLOWED:
                used.add((place, what))
            else:
                wrong.append(f"{place}: {what}")
    assert not wrong, wrong
    assert used == set(ALLOWED), f"{set(ALLOWED) - used}: an exception that nothing needs"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import os\nos.fork()", ["os.fork"]),
        ("import os\nif hasattr(os, 'fork'):\n    os.fork()", []),
        ("import os\nif hasattr(os, 'kill'):\n    os.fork()", ["os.fork"]),
        ("import os\nx = os.nice(0) if hasattr(os, 'nice') else 0", []),
        ("from signal import SIGKILL, SIGINT", ["signal.SIGKILL"]),
        ("import signal\nx = getattr(signal, 'SIGKILL', 9)", []),
        ("import fcntl\nfrom resource import getrusage", ["fcntl", "resource"]),
        ("open('x')\nopen('x', 'rb')\nopen('x', 'w', encoding='utf-8')", ["open without an encoding"]),
        ("p.read_text()\np.read_text('utf-8')\np.write_text(t)", ["read_text", "write_text"]),
        ("p.open('a')\np.open('rb')\nsites.open(key)", ["open without an encoding"]),
        ("subprocess.run(c, text=True)\nsubprocess.run(c)", ["run without an encoding"]),
        ("Path('/proc/self/maps')", ["/proc/self/maps"]),
        ("os.fdopen(h, 'wb')\nTemporaryFile(dir=d)\nos.fdopen(h)", ["fdopen without an encoding"]),
    ],
)
def test_the_scan_sees(text: str, found: list[str]) -> None:
    assert [what.removesuffix(" without an encoding") for what in found_in(text)] == [
        what.removesuffix(" without an encoding") for what in found
    ]


# As on Windows: what it lacks is gone before anything of halfulp is imported, and a text file without an encoding is an
# error.
ELSEWHERE = """
import json, os, signal, sys, warnings
import torch
lacking = json.loads(sys.argv[1])
for module, names in lacking.items():
    for name in names:
        if hasattr(sys.modules[module], name) and name not in ("waitpid", "WNOHANG"):
            delattr(sys.modules[module], name)
warnings.simplefilter("error")
warnings.filterwarnings("ignore", category=EncodingWarning)
warnings.filterwarnings("error", category=EncodingWarning, module="halfulp")
"""
STEP = """
import halfulp as hu
model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
optimizer = hu.optim.AdamW(model.parameters(), lr=1e-3, weight_update="kahan")
model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().sum().backward()
before = model.weight.detach().clone()
optimizer.step()
assert not torch.equal(before, model.weight)
assert hu.quantize(torch.tensor([1.3]), "e5m2").tolist() == [1.25]
from halfulp.environment import describe_environment
assert describe_environment()["processor"]["cores"] >= 1
from halfulp.trials.running import _pool
assert _pool.describe_exit_code(-15) == "was killed by SIGTERM"
assert _pool.describe_exit_code(-9) == "was killed by SIGKILL, as where memory is short"
from halfulp.observation.scripts._watch import report_and_exit_on_sigterm
with report_and_exit_on_sigterm(lambda ending: ending.code):
    pass
print("stepped")
"""


def lacking() -> str:
    """What Windows lacks of the modules that the sources use."""
    kept = {"os": {"O_BINARY"}, "signal": set()}
    return json.dumps({module: sorted(SOME_NAMES[module] - kept[module]) for module in kept})


def test_a_step_where_windows_names_are_missing(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ELSEWHERE + STEP, encoding="utf-8")
    # A named processor is asked about by a temporary file, for which Python has looked at what is taken away later.
    environment = {name: value for name, value in os.environ.items() if name != "HALFULP_CPU_NAME"}
    done = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", str(program), lacking()],
        env={**environment, "HALFULP_CACHE_DIR": str(tmp_path / "kernels"), "USERNAME": "somebody"},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "stepped\n"), done.stderr


def test_the_simulation_takes_away_what_is_there() -> None:
    taken = json.loads(lacking())
    assert {"fork", "register_at_fork", "sched_getaffinity", "geteuid"} <= set(taken["os"])
    assert "SIGKILL" in taken["signal"]
    if sys.platform == "linux":
        assert hasattr(os, "fork")
        assert hasattr(signal, "SIGKILL")
