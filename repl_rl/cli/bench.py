"""`repl-rl bench`: run a benchmark of the checkout. Benchmarks are no part of an installed package."""

from collections.abc import Sequence

from repl_rl.utils.package_data import add_checkout_to_path


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code.

    Raises:
        ConfigError: the package does not run from a checkout.
    """
    add_checkout_to_path()
    # Only a checkout has it, and only now it can be found.
    from benchmarks.cli import main as run_benchmark

    return run_benchmark(argv)
