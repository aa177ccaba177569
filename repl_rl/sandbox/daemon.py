"""Docker daemon: the used part of its package as protocols, the connection, and a check of its hardening."""

from collections.abc import Generator, Mapping
from typing import Protocol, TypedDict

from repl_rl.errors import SandboxUnavailable

REMEDY = "or use --sandbox local, or --sandbox unsafe"


def unavailable(problem: str, remedy: str) -> SandboxUnavailable:
    return SandboxUnavailable(f"sandbox 'docker': {problem}; {remedy}, {REMEDY}")


class State(TypedDict):
    """Used part of the container state in `docker inspect`."""

    Pid: int
    """Number of the first process, as the daemon sees it. 0 means that the container does not run."""


class Container(Protocol):
    """Used part of `docker.models.containers.Container`."""

    status: str
    attrs: Mapping[str, "State"]

    def start(self) -> None: ...
    def reload(self) -> None: ...
    def logs(self, *, tail: int) -> bytes: ...
    def remove(self, *, force: bool) -> None: ...
    def wait(self, *, condition: str, timeout: int) -> dict[str, object]: ...


class Image(Protocol):
    """Used part of `docker.models.images.Image`."""

    id: str
    tags: list[str]


class Images(Protocol):
    """Used part of `docker.models.images.ImageCollection`."""

    def get(self, name: str) -> Image: ...
    def pull(self, repository: str, tag: str | None = None) -> Image: ...
    def list(self) -> list[Image]: ...


class Containers(Protocol):
    """Used part of `docker.models.containers.ContainerCollection`."""

    def get(self, container_id: str) -> Container: ...
    def run(self, image: str, command: list[str], *, remove: bool, network_mode: str) -> bytes: ...


class Api(Protocol):
    """Used part of `docker.api.APIClient`."""

    def create_host_config(self, **settings: object) -> dict[str, object]: ...
    def create_container(self, image: str, command: list[str], **settings: object) -> dict[str, str]: ...
    def build(
        self, *, path: str, tag: str, buildargs: dict[str, str], rm: bool, forcerm: bool, decode: bool
    ) -> Generator[dict[str, object], None, None]: ...


class Daemon(Protocol):
    """Used part of `docker.DockerClient`."""

    api: Api
    containers: Containers
    images: Images

    def ping(self) -> bool: ...
    def info(self) -> dict[str, object]: ...


def connect() -> Daemon:
    """Connect to the Docker daemon.

    Raises:
        SandboxUnavailable: no daemon answers, or this user has no permission.
    """
    import docker  # slow to import

    try:
        client: Daemon = docker.from_env()
        client.ping()
    except docker.errors.DockerException as error:
        if "Permission denied" in str(error):
            raise unavailable("no permission to talk to the daemon", "join the group 'docker'") from error
        raise unavailable("no daemon answers", "start it (systemctl start docker)") from error
    return client


def refuse_weak(info: Mapping[str, object]) -> None:
    """Reject a daemon that would start a container without part of its hardening, and only warn about it.

    `info`: report of `docker info`.

    Raises:
        SandboxUnavailable: no seccomp, or a limit that its cgroups do not enforce.
    """
    options = info.get("SecurityOptions")
    if not (isinstance(options, list) and any("name=seccomp" in str(option) for option in options)):
        raise unavailable("the daemon has no seccomp", "use a kernel with CONFIG_SECCOMP_FILTER")
    for name, limit in (("MemoryLimit", "memory"), ("PidsLimit", "processes"), ("CpuCfsQuota", "processors")):
        if not info.get(name):
            raise unavailable(f"the daemon's cgroups do not limit {limit}", "enable that cgroup controller")
