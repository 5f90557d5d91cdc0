"""Runs scripts in processes of their own that need not import torch again: `python -W error fork_server.py [bare]`.

Each line of standard input is a JSON object: script, arguments, environment, directory, a file for its output, and one
for its errors, which may be the same. The process forks itself; the child runs the script as `python -c` would, where
asked in a session of its own. Standard output has the child's id, then its exit code. A test of several ranks takes a
server each; neighbours hash differently, as processes of a launcher do. A line with two named pipes asks for another
server, forked from this one, which takes its lines from the first and answers in the second; where it `prepares`, it
imports what takes long first. A bare server has imported torch and nothing of this library.
"""

import atexit
import ctypes
import gc
import json
import os
import sys
import threading
import types
import warnings
from typing import NoReturn

sys.path[0] = ""


def prepare_bare() -> None:
    """Import torch, as a user does first."""
    gc.disable()
    import torch

    assert torch.get_num_threads() == 1, "threads do not live on in a forked process"
    gc.freeze()
    gc.enable()


def prepare() -> None:
    """Import what takes long and stays, where warnings of other packages' imports are of no interest."""
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import llvmlite.binding
        import torch._dynamo
        import torch.distributed.checkpoint.state_dict
        import torch.distributed.fsdp

        import halfulp
        import halfulp.gradients
        import halfulp.kernels.vector._machine_function
        import halfulp.observation

        # A child's end would remove the folder that older versions of torch make for all their processes.
        instantiator = sys.modules.get("torch.distributed.nn.jit.instantiator")
        if hasattr(instantiator, "_TEMP_DIR"):
            instantiator._TEMP_DIR._finalizer.detach()
        assert halfulp.optim.AdamW
        assert llvmlite.binding
        assert halfulp.kernels.vector._machine_function
        assert torch.get_num_threads() == 1, "threads do not live on in a forked process"
    gc.freeze()
    gc.enable()


def wait_for_script() -> dict | None:
    """In a child what it is to run, in the server itself None when there is nothing more to do."""
    while line := sys.stdin.readline():
        request = json.loads(line)
        child = os.fork()
        if pipes := request.get("pipes"):
            if child == 0:
                # The streams stay, so that what a child sends elsewhere is sent elsewhere.
                with open(pipes[0]) as lines, open(pipes[1], "w") as answers:
                    os.dup2(lines.fileno(), 0)
                    os.dup2(answers.fileno(), 1)
                if request["prepares"]:
                    prepare()
            continue
        if child == 0:
            return request
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def run(request: dict) -> None:
    """The script as the main module, its output and errors in files, nothing to read."""
    if request.get("session"):
        os.setsid()
    written = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    files = ((os.devnull, os.O_RDONLY), (request["output"], written), (request["errors"], written))
    for stream, (path, flags) in enumerate(files):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, stream)
        os.close(opened)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.argv = ["-c", *request["arguments"]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(request["script"], "<string>", "exec"), main.__dict__)


def run_and_end(request: dict) -> NoReturn:
    """Run it and end as Python does, but for taking all modules apart: the system would copy what is shared, .4 s."""
    code: object = 0
    try:
        run(request)
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    prepare_bare() if sys.argv[1:] == ["bare"] else prepare()
    found = wait_for_script()
    if found is None:
        os._exit(0)
    run_and_end(found)
