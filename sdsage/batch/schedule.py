"""Which job a place gets next: one of the model that it has loaded, if there is any left."""

from collections import Counter, deque
from collections.abc import Iterable

from sdsage.batch.plan import Job


class Queue:
    """Jobs that wait, by model, in their order."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._groups: dict[str, deque[Job]] = {}
        self._loaded: dict[str, str] = {}  # place -> group
        for job in jobs:
            self._groups.setdefault(job.group, deque()).append(job)

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def take(self, place: str) -> Job | None:
        """The next job for a place; None when there is none."""
        group = self._loaded.get(place, "")
        if not self._groups.get(group):
            group = self._choose()
        if not group:
            return None
        self._loaded[place] = group
        return self._groups[group].popleft()

    def _choose(self) -> str:
        """A model that nobody works with, else the one with the most jobs left for each who does."""
        at_work = Counter(self._loaded.values())
        waiting = [group for group, jobs in self._groups.items() if jobs]
        free = [group for group in waiting if not at_work[group]]
        if free:
            return free[0]
        return max(waiting, key=lambda group: len(self._groups[group]) / at_work[group], default="")

    def put_back(self, job: Job) -> None:
        """It is to be tried again, next."""
        self._groups.setdefault(job.group, deque()).appendleft(job)

    def forget(self, place: str) -> None:
        """It is gone, and its model with it."""
        self._loaded.pop(place, None)
