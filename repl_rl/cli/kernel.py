"""`repl-rl kernel install`: install the kernelspec by which Jupyter finds our console."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jupyter_core.paths import jupyter_data_dir, jupyter_path

from repl_rl.errors import ConfigError
from repl_rl.sandbox import jupyter_kernelspec as jupyter
from repl_rl.settings.argument_parser import parse


@dataclass(frozen=True)
class InstallConfig:
    """Install the kernelspec with which Jupyter offers our console. One of --user, --prefix and --sys-prefix selects
    the place. The default is --sys-prefix."""

    user: bool = False
    """Install for this user, for Jupyter in any environment."""
    prefix: Path | None = None
    """Install below this folder, in share/jupyter/kernels. Without it one of the other two options applies."""
    sys_prefix: bool = False
    """Install for the environment that repl-rl runs in."""
    name: str = jupyter.NAME
    """Name of the kernelspec: letters, digits, `-`, `.` and `_`. One of ours with the same name is replaced."""
    isolated: bool = True
    """Run the console inside bubblewrap: without network, on a read-only file system. Jupyter must then run in an
    environment with repl_rl."""

    def __post_init__(self) -> None:
        if self.user + self.sys_prefix + (self.prefix is not None) > 1:
            raise ConfigError("place", "more than one", "give one of --user, --prefix and --sys-prefix")

    @property
    def data_folder(self) -> Path:
        """Jupyter's data folder to write to."""
        if self.user:
            return Path(jupyter_data_dir())
        return jupyter.get_data_folder(self.prefix) if self.prefix is not None else jupyter.get_data_folder()


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    action, rest = (argv[0], argv[1:]) if argv else ("", argv)
    if action in ("-h", "--help"):
        print("usage: repl-rl kernel install [options]    (--help after it lists them)")
        return 0
    if action != "install":
        raise ConfigError("kernel action", action, "choose install")
    config = parse(InstallConfig, "kernel install", rest)
    folder = jupyter.install_kernelspec(config.data_folder, name=config.name, isolated=config.isolated)
    print(f"kernel {config.name}: {folder}")
    if str(folder.parent) not in jupyter_path("kernels"):
        print(f"Jupyter finds it with JUPYTER_PATH={config.data_folder.absolute()}")
    return 0
