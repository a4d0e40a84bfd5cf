"""The router among workers that die: every request ends, with contiguous output, or is the cause.

Simulated workers do one thing at a time in random order: take the next request to a seat, say how
far the prefill is, draw a token. No clock, no process.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from engine import errors
from engine.request import Abort, Finished, Output, Progress, SamplingParams, Submit, ToWorker
from engine.router import ActiveRequest, RoutedWorker, Router

SEATS = 4


def token(request_id: str, sample_index: int, index: int) -> int:
    """What every worker draws there: an output that went through many hands is still this one."""
    return sum(map(ord, request_id)) * 31 + 1000 * sample_index + index


@dataclass(eq=False)
class Job:
    """One attempt in a worker."""

    submit: Submit
    num_output: int
    num_steps: int = 0
    has_progressed: bool = False


class Died(Exception):
    """The worker did, just now."""


@dataclass(eq=False)
class SimulatedWorker:
    """Runs `SEATS` jobs at a time; dies when the poisonous request is to draw its token."""

    router: Router
    role: str
    poison: tuple[str, int] | None
    inbox: list[ToWorker] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    leased: set[int] = field(default_factory=set)  # attempts of prefills that were handed off

    def __post_init__(self) -> None:
        self.routed: RoutedWorker = self.router.worker_ready(self.role, self.inbox.append)

    def step(self, chance: random.Random) -> None:
        """Read the inbox and let one job get on. Raises Died."""
        for message in self.inbox:
            self._read(message)
        self.inbox.clear()
        if self.jobs:
            self._advance(chance.choice(self.jobs[:SEATS]))

    def _read(self, message: ToWorker) -> None:
        match message:
            case Submit():
                self.jobs.append(Job(message, len(message.output_ids)))
            case Abort():
                self.leased.discard(message.attempt)
                for job in self.jobs:
                    if job.submit.attempt == message.attempt:
                        self.jobs.remove(job)
                        self._say(Finished(*_name(job), "cancelled"))
                        break

    def _advance(self, job: Job) -> None:
        submit, job.num_steps = job.submit, job.num_steps + 1
        if job.num_steps <= 2:
            self._say(Progress(*_name(job), len(submit.prompt_ids) * (job.num_steps - 1)))
        elif submit.hand_off:
            self._end(job, "prefilled")
            self.leased.add(submit.attempt)
        elif (submit.request_id, job.num_output) == self.poison:
            raise Died
        elif job.num_output < submit.max_tokens:
            drawn = token(submit.request_id, submit.sample_index, job.num_output)
            self._say(Output(*_name(job), job.num_output, [drawn]))
            job.num_output, job.has_progressed = job.num_output + 1, True
        else:
            self._end(job, "length")

    def _end(self, job: Job, reason: str) -> None:
        self.jobs.remove(job)
        self._say(Finished(*_name(job), reason))

    def _say(self, message: Output | Finished | Progress) -> None:
        assert self.router.on_message(message), f"not contiguous: {message}"


def _name(job: Job) -> tuple[str, int, int]:
    return job.submit.request_id, job.submit.attempt, job.submit.sample_index


@dataclass
class Simulation:
    """A router, its workers and the requests; `num_deaths` counts all of them."""

    chance: random.Random
    roles: list[str] = field(default_factory=lambda: ["unified"])
    poison: tuple[str, int] | None = None
    num_deaths: int = 0
    requests: list[ActiveRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.router = Router(1000, has_roles="prefill" in self.roles)
        self.workers = [self._worker(role) for role in self.roles]

    def _worker(self, role: str) -> SimulatedWorker:
        return SimulatedWorker(self.router, role, self.poison)

    def submit(self, name: str, num_samples: int = 1, max_tokens: int = 6) -> None:
        submit = Submit(name, 0, [1, 2, 3], [], SamplingParams(), 0, max_tokens, [])
        first = ActiveRequest(submit)
        samples = [first] + [
            ActiveRequest(
                Submit(name, 0, [1, 2, 3], [], SamplingParams(), 0, max_tokens, [], index),
                events=first.events,
            )
            for index in range(1, num_samples)
        ]
        self.router.submit(samples)
        self.requests += samples

    def kill(self, worker: SimulatedWorker) -> None:
        """Another of its role takes its place at once."""
        self.num_deaths += 1
        self.workers.remove(worker)
        self.router.worker_lost(worker.routed)
        self.check()
        self.workers.append(self._worker(worker.role))

    def turns(self, limit: int = 3000) -> Iterator[None]:
        """Until no request is active."""
        for _ in range(limit):
            if not self.router.num_active:
                return
            worker = self.chance.choice(self.workers)
            try:
                worker.step(self.chance)
            except Died:
                self.kill(worker)
            self.check()
            yield
        raise AssertionError(f"{self.router.num_active} requests never end")

    def check(self) -> None:
        """Every active request is in one place, and the suspects' places are theirs alone."""
        router = self.router
        waiting = [request for group in router._suspects for request in group]
        assert len(set(waiting)) == len(waiting), "in two groups"
        assert all(router._suspects), "an empty group"
        for request in router._active.values():
            on = [w for w in router._workers if request in w.requests]
            assert on == ([request.worker] if request.worker else [])
            assert request not in waiting or request.worker is None
            if request.worker is None and request not in waiting:
                role = router._role_of(request)
                able = [w for w in router._workers if w.role == role and not w.under_test]
                assert not able, "it waits though a worker would take it"
        for worker in router._workers:
            assert worker.under_test <= worker.requests
            assert all(router._active.get(r.key) is r for r in worker.requests)
        assert all(router._active.get(r.key) is r for r in waiting)

    def failed(self) -> set[str]:
        found = set()
        for request in self.requests:
            while not request.events.empty():
                if isinstance(request.events.get_nowait(), errors.EngineError):
                    found.add(request.submit.request_id)
        return found

    def check_outputs(self, *, besides: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        for request in self.requests:
            submit = request.submit
            if submit.request_id not in besides:
                indices = range(submit.max_tokens)
                expected = [token(submit.request_id, submit.sample_index, i) for i in indices]
                assert request.output_ids == expected


ROLES = [["unified"], ["unified"] * 3, ["prefill", "decode"], ["prefill", "decode", "decode"]]


@pytest.mark.parametrize("roles", ROLES, ids="+".join)
@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("seed", range(6))
def test_only_the_poisonous_request_fails(roles: list[str], at: int, seed: int) -> None:
    """One of eight kills its worker at an output: it fails alone, after few deaths."""
    chance = random.Random(seed)
    simulation = Simulation(chance, roles, (f"r{seed}", at))
    for number in range(8):
        simulation.submit(f"r{number}")
    for _ in simulation.turns():
        pass
    assert simulation.failed() == {f"r{seed}"}
    simulation.check_outputs(besides={f"r{seed}"})
    assert simulation.num_deaths <= 7, "one, three times a half of the seats, then alone"


@pytest.mark.parametrize("roles", ROLES, ids="+".join)
@pytest.mark.parametrize("seed", range(10))
def test_workers_that_are_killed_at_random_fail_nobody(roles: list[str], seed: int) -> None:
    """Workers die all the time, of no request's doing: all end, and with their own tokens.

    One that runs alone, without a token in between, is left alive: that is what a poisonous
    request looks like.
    """
    chance = random.Random(100 + seed)
    simulation = Simulation(chance, roles)
    for number in range(8):
        simulation.submit(f"r{number}", num_samples=1 + number % 3, max_tokens=4 + number)
    for _ in simulation.turns(20_000):
        worker = chance.choice(simulation.workers)
        begun = [job for job in worker.jobs if job.num_steps]
        is_alone = len(begun) < 2 and not any(job.has_progressed for job in begun)
        if chance.random() < 0.05 and (len(worker.jobs) > 1 or begun) and not is_alone:
            simulation.kill(worker)
    assert simulation.num_deaths > 3
    assert simulation.failed() == set()
    simulation.check_outputs()


@pytest.mark.parametrize("roles", ROLES, ids="+".join)
@pytest.mark.parametrize("seed", range(10))
def test_clients_that_leave_at_random_leave_nothing(roles: list[str], seed: int) -> None:
    """Aborts, streams that end and new requests while workers die: nobody hangs, no lease stays."""
    chance = random.Random(200 + seed)
    simulation = Simulation(chance, roles)
    router = simulation.router
    for number in range(6):
        simulation.submit(f"r{number}", num_samples=1 + number % 3, max_tokens=8)
    for turn, _ in enumerate(simulation.turns(20_000)):
        if turn < 400 and chance.random() < 0.1:
            request = chance.choice(simulation.requests)
            act = chance.choice([router.stop_sample, router.forget])
            if chance.random() < 0.2:
                router.abort(request.submit.request_id)
            else:
                act(request)
            simulation.check()
        if turn < 400 and chance.random() < 0.05:
            simulation.submit(f"n{turn}", num_samples=chance.randint(1, 3), max_tokens=8)
        if turn < 400 and chance.random() < 0.02:
            simulation.kill(chance.choice(simulation.workers))
    for worker in simulation.workers:
        worker.step(chance)
        assert (worker.jobs, worker.leased, worker.routed.requests) == ([], set(), set())
    for request in simulation.requests:
        submit = request.submit
        length = len(request.output_ids)
        expected = [token(submit.request_id, submit.sample_index, i) for i in range(length)]
        assert request.output_ids == expected
