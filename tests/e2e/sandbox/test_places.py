"""The `local` sandbox starts wherever checkout, environment and base Python lie, and shows no more of that place."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from repl_rl.sandbox import Limits, open_sandbox
from repl_rl.sandbox.bubblewrap import INSTEAD, find_remedy
from tests.support.processes import wait_for
from tests.support.sandbox.environments import (
    NOBODY,
    PACKAGES,
    ROOT,
    VERSION,
    ask,
    base_python,
    environment,
    site_packages,
)

PLACES = ("/tmp", "/run", "/var/tmp", "/dev/shm", "/opt", os.path.expanduser("~"))
ROOMS = ("/tmp", "/run", "/var/tmp", "/dev/shm", "/root", "/home", "/opt", "/var")
SEES = f"{{p: sorted(os.listdir(p)) for p in {ROOMS!r} if os.path.isdir(p)}}"
"""Whatever of those folders there is, in a console that has imported `os`."""
SYSTEM_PYTHON = Path("/usr/bin", VERSION)


def borrowed(folder: str) -> set[str]:
    """What leads from a folder to the packages of these tests, which their environments borrow: a checkout there."""
    return {path.relative_to(folder).parts[0] for path in (ROOT, PACKAGES) if path.is_relative_to(folder)}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder with a space and letters that are not ASCII, for its owner only, with a file that no console may see."""
    if not os.access(request.param, os.W_OK):
        pytest.skip(f"this user may not write to {request.param}")
    folder = Path(tempfile.mkdtemp(prefix="ein Örtchen ", dir=request.param))
    (folder / "secret").write_text("secret")
    yield folder
    shutil.rmtree(folder)


def test_environment_and_base_python_may_lie_anywhere_and_nothing_beside_them_is_seen(place: Path) -> None:
    python = environment(place / "env", base_python(place / "base python"))
    said = ask(
        python,
        [
            "import os, sys, csv, decimal, sqlite3",
            "sys.prefix, sys.base_prefix, os.path.dirname(csv.__file__)",
            "import zmq",
            "os.listdir(), open('mine', 'w').write('x'), open('/tmp/mine', 'w').write('x')",
            f"os.listdir({str(place)!r}), os.listdir({str(place / 'env')!r})[:0]",
            f"any(os.access(p, os.W_OK) for p in {[*map(str, (place, place / 'env', place / 'base python'))]!r})",
            "import subprocess",
            "subprocess.run([sys.executable, '-c', 'import zmq; print(6 * 7)'], capture_output=True).stdout",
            SEES,
        ],
    )
    assert isinstance(said, list), said
    prefix, base = str(place / "env"), str(place / "base python")
    assert said[:3] == ["", f"{(prefix, base, f'{base}/lib/{VERSION}')!r}\n", ""]
    assert said[3] == "([], 1, 1)\n"
    assert sorted(eval(said[4])[0]) == ["base python", "env"]
    assert said[5] == "False\n"
    assert said[7] == "b'42\\n'\n"
    seen = eval(said[8])
    assert set(seen["/tmp"]) <= {"console", "mine", place.name} | borrowed("/tmp")
    assert set(seen["/dev/shm"]) <= {place.name} | borrowed("/dev/shm")
    assert set(seen["/run"]) <= {"console", place.name} | borrowed("/run")


def test_links_are_followed_wherever_they_lie_and_whatever_they_lead_through(tmp_path: Path) -> None:
    base = base_python(tmp_path / "store" / "3.11")
    (tmp_path / "current").symlink_to("store/3.11")  # as uv's and Homebrew's
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / VERSION).symlink_to(f"../current/bin/{VERSION}")
    shutil.move(base.parent.parent / "lib", tmp_path / "library")
    (base.parent.parent / "lib").symlink_to(tmp_path / "library")
    (tmp_path / "work").symlink_to(tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    python = environment(tmp_path / "work" / "env", tmp_path / "bin" / VERSION)
    said = ask(python, ["import csv, sys", "sys.prefix", "import zmq", "open(csv.__file__).readable()"])
    assert said == ["", f"{str(tmp_path / 'work' / 'env')!r}\n", "", "True\n"]


def test_a_checkout_may_lie_anywhere_even_behind_a_long_path(tmp_path: Path) -> None:
    checkout = tmp_path / "Mein Prüfstand" / ("x" * 100)
    for name in ("repl_rl", "sandbox"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "policies"))
    assert ask(Path(sys.executable), ["6 * 7"], checkout=checkout, tmpdir=str(checkout)) == ["42\n"]


def test_an_unsafe_console_runs_where_addresses_in_the_temporary_folder_would_be_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    async def main() -> None:
        async with open_sandbox("unsafe", warm=0) as sandbox, sandbox.session() as session:
            assert (await session.push("6 * 7")).text == "42\n"
            assert (await session.push("import os; os.getcwd()")).text.startswith(f"'{folder}")

    asyncio.run(main())
    wait_for(lambda: not list(folder.iterdir()), None, 60)


def test_an_editable_package_is_seen_and_nothing_else_of_its_project(tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    project = tmp_path / "project"
    (project / "mine").mkdir(parents=True)
    (project / "mine" / "__init__.py").write_text("answer = 42\n")
    (project / "answers.txt").write_text("secret")
    (site_packages(tmp_path / "env") / "mine.pth").write_text(f"{project}\n")
    said = ask(python, ["import mine, os; mine.answer", f"os.listdir({str(project)!r})"], preload=["mine"])
    assert said == ["42\n", "['mine']\n"]


def test_packages_that_an_installer_only_linked_are_followed_to_its_cache(tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    cached, packages = tmp_path / "cache" / "1234", site_packages(tmp_path / "env")
    for name in ("linked", "linked-1.dist-info"):
        (cached / name).mkdir(parents=True)
        (packages / name).mkdir()
    for name in ("linked/__init__.py", "linked-1.dist-info/METADATA"):
        (cached / name).write_text("")
        (packages / name).symlink_to(cached / name)
    assert ask(python, ["import linked"]) == [""]


def test_what_consoles_see_again_in_tmp_cannot_be_written_to() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        said = ask(environment(Path(folder, "env")), ["import os", f"os.mkdir({folder + '/mine'!r})", "os.getcwd()"])
    assert isinstance(said, list), said
    assert "Read-only file system" in said[1]
    assert said[2] == "'/tmp/console'\n"


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="all other tests run as a user who is not root already")


@needs_root
@pytest.mark.skipif(not SYSTEM_PYTHON.exists(), reason=f"there is no {SYSTEM_PYTHON} that every user can run")
@pytest.mark.parametrize("where", ["/tmp", "/dev/shm", "/var/tmp"])
def test_a_user_without_privileges_has_the_same_in_a_folder_of_his_own(where: str) -> None:
    with _for_nobody(where) as (folder, python, packages):
        name = str(folder)
        writable = f"any(os.access(p, os.W_OK) for p in {(name, f'{name}/env', f'{name}/env/lib')!r})"
        said = ask(python, ["import os", "os.getuid(), os.listdir()", writable, SEES], checkout=packages, user=NOBODY)
        assert isinstance(said, list), said
        assert said[1:3] == ["(1000, [])\n", "False\n"]
        seen = eval(said[3])
        assert set(seen["/tmp"]) | set(seen["/dev/shm"]) <= {"console", folder.name}


PROBED = """
import asyncio
from repl_rl.sandbox import open_sandbox
from repl_rl.sandbox.conformance import check_isolation

async def main():
    async with open_sandbox("local", warm=2) as sandbox:
        rows = await check_isolation(sandbox)
    print(len(rows), *(f"{row.name}: {row.detail}" for row in rows if not row.passed), sep="\\n")

asyncio.run(main())
"""


@needs_root
@pytest.mark.skipif(not SYSTEM_PYTHON.exists(), reason=f"there is no {SYSTEM_PYTHON} that every user can run")
def test_consoles_of_a_user_without_privileges_keep_every_promise_of_isolation() -> None:
    with _for_nobody("/var/tmp") as (_, python, packages):
        done = subprocess.run(
            [python, "-B", "-c", PROBED],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(packages), "HOME": "/"},
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
    count, _, failed = done.stdout.partition("\n")
    assert (done.returncode, failed) == (0, ""), done.stderr + failed
    assert int(count) >= 75


DROPS = """
import sys
sys.path.insert(0, sys.argv[1])
import libc_calls
libc_calls.drop_capabilities()
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("Cap")])
"""


@needs_root
@pytest.mark.parametrize("user", [0, NOBODY])
def test_capabilities_are_given_up_by_a_user_who_has_them_and_by_one_who_has_none(user: int) -> None:
    # The kernel of Jupyter does so inside bubblewrap, which leaves none to a user without privileges.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        shutil.copy(ROOT / "sandbox" / "repl_kernel" / "libc_calls.py", folder)
        os.chmod(folder, 0o755)
        inside = [str(SYSTEM_PYTHON), "-B", "-c", DROPS, folder]
        bwrap = ["bwrap", "--unshare-user", "--ro-bind", "/", "/", "--proc", "/proc", "--unshare-pid"]
        done = subprocess.run(
            [*bwrap, *inside],
            user=user,
            group=user,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{['0' * 16] * 5}\n"


@contextmanager
def _for_nobody(where: str) -> Iterator[tuple[Path, Path, Path]]:
    """A folder that belongs to another user, with an environment: its interpreter and its folder of packages."""
    with tempfile.TemporaryDirectory(dir=where, prefix="größer ") as name:
        folder = Path(name)
        python = environment(folder / "env", SYSTEM_PYTHON)
        packages = site_packages(folder / "env")
        for module in ("repl_rl", "sandbox"):
            shutil.copytree(ROOT / module, packages / module, ignore=shutil.ignore_patterns("__pycache__", "policies"))
        (packages / "others.pth").unlink()
        _copy_what_the_kernel_imports(packages)
        subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", folder], check=True)
        try:
            yield folder, python, packages
        finally:
            os.chown(folder, 0, 0)


def _copy_what_the_kernel_imports(packages: Path) -> None:
    code = (
        "import sys; sys.path.append(sys.argv[1]); import repl_rl.sandbox, repl_kernel.fork_server; "
        "print(*{m.partition('.')[0] for m in sys.modules "
        "if 'site-packages' in str(getattr(sys.modules[m], '__file__', ''))})"
    )
    listed = subprocess.run([sys.executable, "-c", code, ROOT / "sandbox"], capture_output=True, text=True, check=True)
    for name in [*listed.stdout.split(), *(path.name for path in PACKAGES.glob("*.libs"))]:
        for found in (PACKAGES / name, PACKAGES / f"{name}.py"):
            if found.is_dir():
                shutil.copytree(found, packages / name, dirs_exist_ok=True)
            elif found.exists():
                shutil.copy(found, packages)
    (packages / "copied-1.dist-info").mkdir()


@needs_root
def test_an_environment_that_only_root_may_read_is_refused_with_the_command_that_opens_it(tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    (tmp_path / "env" / "lib").chmod(0o700)
    said = ask(python, ["1"])
    assert isinstance(said, str)
    assert re.search(rf"may not read {tmp_path}/env/lib \(mode 700\); chmod -R go\+rX '{tmp_path}/env/lib'$", said), (
        said
    )


def test_an_interpreter_that_has_gone_is_named_with_the_link_that_led_to_it(tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    gone = tmp_path / "gone"
    first = f"os.unlink({str(python)!r}); os.symlink({str(gone)!r}, {str(python)!r})"
    said = ask(python, ["1"], first=first)
    assert isinstance(said, str)
    assert f"sandbox 'local' needs {python}, which leads to {gone}, which does not exist; " in said


def test_an_interpreter_behind_a_circle_of_links_is_named(tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    said = ask(python, ["1"], first=f"os.unlink({str(python)!r}); os.symlink({str(python)!r}, {str(python)!r})")
    assert isinstance(said, str)
    assert f"needs {python}, which is a circle of links" in said


LOOKED_FOR = ("/etc/fonts", "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/locale.alias", "/etc/mime.types")
NOT_SHOWN = ("/etc/shadow", "/etc/ssl/private", "/etc/hostname", "/etc/machine-id", "/etc/resolv.conf", "/etc/ssh")


def test_what_libraries_look_for_is_there_and_nothing_that_tells_this_machine_from_another() -> None:
    lines = [
        f"import os; [os.path.exists(p) for p in {LOOKED_FOR!r}]",
        f"[p for p in {NOT_SHOWN!r} if os.path.exists(p)]",
        "import time; time.tzname, os.path.exists('/etc/localtime')",
        "import locale; locale.setlocale(locale.LC_ALL, '')",
        "import pwd, getpass; [u.pw_name for u in pwd.getpwall()], getpass.getuser(), os.path.expanduser('~console')",
        "import socket; socket.gethostbyname('localhost')",
        "any(os.access(os.path.join('/etc', n), os.W_OK) for n in os.listdir('/etc'))",
    ]
    there = [os.path.exists(path) for path in LOOKED_FOR]
    assert ask(Path(sys.executable), lines) == [
        f"{there!r}\n",
        "[]\n",
        f"(('UTC', 'UTC'), {os.path.exists('/usr/share/zoneinfo/Etc/UTC')})\n",
        "'C.UTF-8'\n",
        "(['root', 'console'], 'console', '/tmp')\n",
        "'127.0.0.1'\n",
        "False\n",
    ]


def test_importing_matplotlib_and_drawing_with_it_print_nothing() -> None:
    async def main() -> list[str]:
        limits = Limits(line_timeout_s=120, memory_mb=2048, processes=64)
        async with open_sandbox("local", limits=limits, warm=0) as sandbox, sandbox.session() as session:
            lines = ("import matplotlib.pyplot as plt", "figure = plt.figure(); figure.savefig('figure.png')")
            return [(await session.push(line)).text for line in lines]

    assert asyncio.run(main()) == ["", ""]


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("bwrap: No permissions to create new namespace, likely because ...", r"namespaces|start that with"),
        ("bwrap: setting up uid map: Permission denied", r"namespaces|start that with"),
        ("bwrap: execvp /a b/python: No such file or directory", r"look at file '/a b/python'"),
        ("bwrap: execvp /a/python: Permission denied", r"chmod -R go\+rX the folder of /a/python"),
        ("python: error while loading shared libraries: libx.so.1: cannot open", r"libx.so.1 only through LD_LIBRARY"),
        ("bwrap: Can't find source path /a b: Permission denied", "see that this user may read /a b"),
        ("ModuleNotFoundError: No module named 'zmq'", "pip install ipykernel"),
        ("OSError: [Errno 28] No space left on device", "make room"),
        ("something else", "see what that says"),
    ],
)
def test_the_remedy_helps_against_the_cause_that_was_found(words: str, remedy: str) -> None:
    said = find_remedy(words)
    assert re.search(remedy, said)
    assert said.endswith(INSTEAD)
    assert "install bubblewrap" not in said


ANSWERS = [
    "from repl_rl.tasks.generated_tasks import generate",
    "import os; [os.listdir(p + '/repl_rl') for p in {places!r} if os.path.isdir(p + '/repl_rl')]",
    "[p for p in {places!r} if os.access(p + '/repl_rl', os.W_OK)]",
    "6 * 7",
]


def _as_from_a_wheel(packages: Path) -> None:
    """This package where a wheel would put it."""
    ignored = shutil.ignore_patterns("__pycache__", "policies")
    shutil.copytree(ROOT / "repl_rl", packages / "repl_rl", ignore=ignored)
    for name in ("sandbox", "prompts"):
        shutil.copytree(ROOT / name, packages / "repl_rl" / "_assets" / name, ignore=ignored)
    about = packages / "repl_rl-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: repl_rl\nVersion: 1\n")


@pytest.mark.parametrize("how", ["copied", "folder linked", "files linked", "also in the base"])
def test_an_installed_package_is_covered_with_the_answers_of_its_tasks(tmp_path: Path, how: str) -> None:
    base = base_python(tmp_path / "base") if how == "also in the base" else None
    python = environment(tmp_path / "env", base)
    packages = site_packages(tmp_path / "env")
    kept = packages if how in ("copied", "also in the base") else tmp_path / "archive"
    kept.mkdir(exist_ok=True)
    _as_from_a_wheel(kept)
    if how == "folder linked":
        for entry in kept.iterdir():
            (packages / entry.name).symlink_to(entry)
    elif how == "files linked":
        for file in [path for path in kept.rglob("*") if path.is_file()]:
            (packages / file.relative_to(kept)).parent.mkdir(parents=True, exist_ok=True)
            (packages / file.relative_to(kept)).symlink_to(file)
    places = [str(packages), str(kept)]
    if base is not None:
        below = site_packages(tmp_path / "base")
        below.mkdir()
        _as_from_a_wheel(below)
        places.append(str(below))
    said = ask(python, [line.replace("{places!r}", repr(places)) for line in ANSWERS], checkout=packages)
    assert isinstance(said, list), said
    assert "ModuleNotFoundError: No module named 'repl_rl" in said[0]
    assert [listed for listed in eval(said[1]) if listed] == []
    assert said[2:] == ["[]\n", "42\n"]
