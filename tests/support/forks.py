"""A forked child that does one thing and tells what became of it."""

import os
import pickle
import sys
import traceback

WAIT_S = 20


def in_fork(function):
    """What `function` returns, or the exception it raises, in a forked child that then exits."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            outcome = function()
        except SystemExit as error:
            outcome = error
        except BaseException as error:  # noqa: BLE001 handed to the test
            traceback.print_exc(file=sys.stderr)
            outcome = error
        os.write(writer, pickle.dumps(outcome))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as told:
        data = told.read()
    os.waitpid(pid, 0)
    return pickle.loads(data)  # noqa: S301 our own child's
