"""Runs the tests of TESTS with each SGLang version, in an environment of its own under build/.

Wheels are fetched without their dependencies and only unpacked; the environment sees the project's.
Arguments go to pytest.
"""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

VERSIONS = ("0.5.18", "0.5.23")
"""The last with a page-major pool of its own, and one whose unified memory has token entries."""
TESTS = ("pools", "kinds", "hosts", "ranks")
"""Of sglang_*.py: plain pools, special ones, host pools, instances of several ranks."""
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLACE = ROOT / "build" / "sglang"


def run(*command):
    subprocess.run(command, check=True)


def environment():
    """The interpreter that has SGLang's imports and the project's packages."""
    python = PLACE / "venv" / "bin" / "python"
    wanted = (HERE / "sglang_requirements.txt").read_text()
    installed = PLACE / "installed.txt"
    if not installed.exists() or installed.read_text() != wanted:
        run(sys.executable, "-m", "venv", "--clear", str(PLACE / "venv"))
        packages = sysconfig.get_path("purelib", vars={"base": str(PLACE / "venv")})
        own = Path(packages) / "project.pth"
        # addsitedir, not the bare folder: an editable project is found by a .pth file in it.
        own.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        requirements = str(HERE / "sglang_requirements.txt")
        run(str(python), "-m", "pip", "install", "-q", "--no-deps", "-r", requirements)
        installed.write_text(wanted)
    return python


def unpacked(version):
    """The folder that holds this version, fetched where it is not there yet."""
    folder = PLACE / version
    if not (folder / "sglang").exists():
        wheels = PLACE / "wheels"
        pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels))
        run(*pip, f"sglang=={version}")
        (wheel,) = wheels.glob(f"sglang-{version}-*.whl")
        partial = PLACE / f"{version}.partial"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial)
        partial.rename(folder)
    return folder


def main():
    PLACE.mkdir(parents=True, exist_ok=True)
    python = environment()
    failed = []
    for version in VERSIONS:
        print(f"SGLang {version}", flush=True)
        settings = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(unpacked(version)), str(ROOT))),
            "SGLANG_USE_CPU_ENGINE": "1",
            "TRITON_INTERPRET": "1",
        }
        tests = [str(HERE / f"sglang_{name}.py") for name in TESTS]
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        if subprocess.run(
            [*command, *sys.argv[1:]], cwd=ROOT, env=settings, check=False
        ).returncode:
            failed.append(version)
    return f"failed with SGLang {', '.join(failed)}" if failed else 0


if __name__ == "__main__":
    sys.exit(main())
