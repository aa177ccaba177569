"""Imports stay light: a mistake on a command line is answered before anything heavy is imported."""

import subprocess
import sys

from repl_rl.cli import VERBS


def test_importing_tasks_and_judges_needs_no_torch() -> None:
    heavy = ("torch", "transformers", "datasets", "pyarrow", "sympy")
    code = f"import sys, repl_rl.tasks, repl_rl.judges; sys.exit(bool(set({heavy}) & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False, timeout=60).returncode == 0


def test_import_repl_rl_is_light() -> None:
    heavy = ("torch", "vllm", "transformers", "trl", "docker", "zmq", "numpy", "ray", "fastapi", "pydantic")
    code = f"import repl_rl, sys; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_verbs_that_train_nothing_answer_a_mistake_before_they_import_torch() -> None:
    verbs = ", ".join(f"repl_rl.cli.{verb}" for verb in sorted(set(VERBS) - {"train", "bench"}))
    code = f"import sys, {verbs}; print([m for m in ('torch', 'trl', 'vllm', 'ray', 'sympy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_training_verb_answers_a_mistake_before_it_imports_trl_or_a_model() -> None:
    heavy = ("trl", "peft", "transformers.trainer", "transformers.modeling_utils", "datasets", "vllm", "matplotlib")
    code = f"import sys, repl_rl.cli.train; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_verbs_need_no_package_of_an_extra() -> None:
    verbs = ", ".join(f"repl_rl.cli.{verb}" for verb in sorted(set(VERBS) - {"bench"}))
    extras = (
        "anywidget",
        "fastapi",
        "jupyter_kernel_client",
        "peft",
        "ray",
        "starlette",
        "uvicorn",
        "verifiers",
        "vllm",
    )
    code = f"import sys; sys.modules.update(dict.fromkeys({extras!r})); import {verbs}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_can_be_imported() -> None:
    import repl_rl

    for name in repl_rl.__all__:
        assert getattr(repl_rl, name) is not None
