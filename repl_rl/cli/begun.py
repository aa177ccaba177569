"""What a verb has done of a long work, kept beside where it goes until all is done: the same command goes on."""

import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from repl_rl.coldstart.verified import Tally
from repl_rl.errors import ConfigError
from repl_rl.machine.alone import maker
from repl_rl.machine.durable import damage, write_durably
from repl_rl.machine.files import write_whole
from repl_rl.machine.folders import restore, take_place
from repl_rl.machine.outputs import Output, clear, contents, followed
from repl_rl.machine.refused import writing
from repl_rl.record.trajectory import Trajectory
from repl_rl.runs.store import append, read
from repl_rl.settings.same import differences

log = logging.getLogger(__name__)

SETTINGS = "config.toml"
PORTION = 256
"""Demonstrations that are kept together: at most so many are executed again."""
_KEPT, _COUNTS = "kept.jsonl.gz", "counts.json"
_THEN = ", then give the command again"


def place_of(out: Path) -> Path:
    """Where what is done so far is kept until `out` is written, next to where a link leads."""
    final = Path(os.path.realpath(out))
    return final.parent / f".{final.name}.begun"


@contextmanager
def begun(out: Path, settings: str, free: Collection[str], output: Output, overwrite: bool) -> Iterator[Path]:
    """The folder beside `out` of what is done so far, with `settings` in config.toml; for this process alone.

    It stays where the block does not end well. Whoever finishes removes it, or makes it `out`.

    Raises:
        ConfigError: `out` is there and not to be replaced, or not what `output` says; or what was begun has other
            settings than those that are `free`, each of which is named; or another process is at work on it; or it
            cannot be written.
    """
    final = _final(out, output, overwrite)
    place = place_of(final)
    output.refuse_owned(place)
    _refuse(final, place, settings, free, output, overwrite)
    with ExitStack() as stack:
        with writing(output.thing, out, then=_THEN):
            stack.enter_context(output.claimed(place))
        told = _refuse(final, place, settings, free, output, overwrite)  # again: nobody else changes it from here on
        with writing(output.thing, out, then=_THEN):
            if told:
                clear(place)
            if not (place / SETTINGS).is_file():
                write_whole(place / SETTINGS, settings)
            else:
                print(f"going on with what {place} has", flush=True)
        try:
            yield place
        finally:
            if place.exists() and contents(place) == [SETTINGS]:  # nothing was done
                clear(place)


def _final(out: Path, output: Output, overwrite: bool) -> Path:
    """Where `out` is, links followed."""
    restore(out, output)
    final = Path(os.path.realpath(followed(output.thing, out)))
    if overwrite:
        output.refuse_other(final)
    if not final.name:
        raise ConfigError(output.thing, str(out), f"that is no place for it; {output.remedy}")
    return final


def _refuse(
    final: Path, place: Path, settings: str, free: Collection[str], output: Output, overwrite: bool
) -> Sequence[str]:
    """Refuse what may not be replaced or resumed; returns why what was begun is removed, nothing where it is not."""
    told: Sequence[str] = ()
    if place.is_dir() and contents(place):
        made_by, has_settings = maker(place), (place / SETTINGS).is_file()
        if made_by != output.verb and not (made_by == "" and has_settings):
            remedy = f"`repl-rl {output.verb}` did not make it, and keeps there what it has done; {output.remedy}"
            raise ConfigError(output.thing, str(place), remedy)
        # without settings it was being removed
        told = differences(place / SETTINGS, settings, free) if has_settings else ["none are left"]
        if has_settings and told and not overwrite:
            remedy = f"{place} was begun with others; give those to go on, or --overwrite to begin anew"
            raise ConfigError("settings", "; ".join(told), remedy)
    if final.exists() and not overwrite:
        raise ConfigError(output.thing, str(final), "it exists; name a new --out, or --overwrite to replace it")
    return told


def finish(made: Path, out: Path, output: Output, overwrite: bool) -> None:
    """Make `made` what `out` is, in place of an older one.

    Raises:
        ConfigError: something else is there by now.
    """
    final = _final(out, output, overwrite)
    if final.exists() and not overwrite:
        raise ConfigError(output.thing, str(out), "it exists by now; move it away, then give the command again")
    take_place(made, final, output)


class Portions:
    """Demonstrations of one source and what became of all others, in folders that are there whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        places = sorted(folder.glob("[0-9]" * 6))
        self._places: list[Path] = []
        for place in places:
            if (wrong := damage(place)) is not None:
                log.warning("%s is damaged: %s; what it holds, and what followed, is made again", place, wrong)
                break
            self._places.append(place)

    def tally(self) -> Tally:
        """Of all that was tried so far."""
        if not self._places:
            return Tally()
        return Tally.of_record(json.loads((self._places[-1] / _COUNTS).read_text(encoding="utf-8")))

    def kept(self) -> list[Trajectory]:
        """All that was kept so far, in order."""
        return [t for place in self._places if (place / _KEPT).exists() for t in read(place / _KEPT)]

    def keep(self, trajectories: Sequence[Trajectory], tally: Tally) -> None:
        """Add those that were kept since the last time; `tally` is of all so far.

        Raises:
            ConfigError: that cannot be written.
        """
        place = self._folder / f"{len(self._places):06d}"

        def fill(made: Path) -> None:
            if trajectories:
                append(made / _KEPT, trajectories)
            (made / _COUNTS).write_text(json.dumps(tally.as_record()), encoding="utf-8")

        with writing("folder", self._folder, "what is done so far", ", then give the command again"):
            write_durably(place, fill)
        self._places.append(place)


Makes = Callable[[Tally, Sequence[Trajectory]], AsyncIterator[Trajectory]]
"""Makes demonstrations from where a tally stands, given those that were kept, and counts in the tally."""


async def kept(
    make: Makes, portions: Portions, told_every: int, portion: int = PORTION
) -> tuple[list[Trajectory], Tally]:
    """All demonstrations of a source, those that `portions` has and the others, and what became of each."""
    tally, done = portions.tally(), portions.kept()
    fresh: list[Trajectory] = []
    marked = tally.done
    async for trajectory in make(tally, tuple(done)):
        fresh.append(trajectory)
        if (len(done) + len(fresh)) % told_every == 0:
            print(f"  {len(done) + len(fresh)} kept, {tally.dropped.total()} dropped", flush=True)
        if tally.done - marked >= portion:
            portions.keep(fresh, tally)
            done, fresh, marked = [*done, *fresh], [], tally.done
    if tally.done > marked:
        portions.keep(fresh, tally)
    return [*done, *fresh], tally
