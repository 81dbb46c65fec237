"""Races with planted times."""

from tilewright.schedule.race import Laps, Race


def steady(times, noise=""):
    """Three rounds in which each contender takes its time in µs, by key or by place."""
    by_key = times if isinstance(times, dict) else dict(enumerate(times))
    return Race({k: Laps((us,) * 3, (us,) * 3, (True,) * 3) for k, us in by_key.items()}, noise)


class StillMeter:
    """A meter that reads one load."""

    def __init__(self, load):
        self._load = load

    def __call__(self, device, threads):
        return self

    def look(self):
        pass

    def load(self):
        return self._load
