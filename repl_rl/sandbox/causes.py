"""Remedies for the error messages of bubblewrap and of the fork server."""

import re
from pathlib import Path

INSTEAD = "or use --sandbox docker, or --sandbox unsafe"
_SWITCHES = (
    ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
    ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
)
"""Settings below /proc/sys that forbid namespaces, the value that forbids them, and the command that allows them."""
_CAUSES = (
    (r"No module named '(zmq|ipykernel|traitlets|tornado|jupyter_client)", "pip install ipykernel in this environment"),
    (
        r"error while loading shared libraries: (\S+):",
        "this Python finds {0} only through LD_LIBRARY_PATH, which is not set inside; take one that finds it by itself",
    ),
    (
        r"execvp (.+): No such file",
        "it or its loader is not where a console sees it: look at file '{0}', and take another Python",
    ),
    (r"execvp (.+): Permission denied", "chmod -R go+rX the folder of {0}, and see that it is not mounted noexec"),
    (
        r"[Cc]an't (?:find source path|bind mount|get type of source|mkdir(?: parents for)?|make symlink at) (.+): "
        r"(?:Permission|Read-only|No such|Not a)",
        "see that this user may read {0}",
    ),
    (r"[Nn]o space left", "make room on the disk, or in the memory, that it names"),
    (r"[Cc]annot allocate memory|Resource temporarily unavailable", "free memory or processes (ulimit -u)"),
)
_NAMESPACES = re.compile(
    r"[Nn]o permissions to creat|[Cc]reating new namespace|setting up [ug]id map|unshare|"
    r"[Oo]peration not permitted|prctl|[Ff]ailed to make / slave"
)


def remedy_for(words: str) -> str:
    """Return the remedy for the cause that the message `words` names, and the sandboxes to use instead."""
    if _NAMESPACES.search(words):
        return f"{_allow_namespaces()}, {INSTEAD}"
    for pattern, remedy in _CAUSES:
        if found := re.search(pattern, words):
            return f"{remedy.format(*found.groups())}, {INSTEAD}"
    return f"see what that says, {INSTEAD}"


def _allow_namespaces() -> str:
    for name, forbids, command in _SWITCHES:
        try:
            value = Path("/proc/sys", name).read_text().strip()
        except OSError:
            # This kernel does not have the setting.
            continue
        if value == forbids:
            return f"allow user namespaces ({command}, as root)"
    return (
        "this process may not make namespaces or filters: where it runs in a container, start that with "
        "--cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
    )
