"""A shard: some clients' data, what they keep, and the one thing that runs tasks for them, wherever it lives."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from unalike.core.client import Clients
from unalike.core.draws import Draws, key
from unalike.core.failure import Diverged
from unalike.core.release import Adder, Partial, Release, Sum, check_held, is_summed, protects
from unalike.core.request import Part, Program, Reply, Request
from unalike.core.roster import Roster
from unalike.core.schema import SCALING, Schema
from unalike.core.shapes import DryRun, check_private, dry_output, dry_run
from unalike.core.task import Task
from unalike.privacy.sampling import Everyone
from unalike.privacy.system import SystemDraws
from unalike.runtime.shard.kept import HELD, KeptStore
from unalike.runtime.shard.simulator import Simulator, zero_reply
from unalike.runtime.shard.work import Work

ASIDES = 8  # runs beside the main one whose kept state is remembered; a server that measures closes them itself


class Refused(ValueError):
    """A request that this shard does not answer; the message says why."""


class PrivateFailure(UserWarning):
    """A client's task failed where all that is released is private; the warning stays where the client lives."""


class Shard:
    """Some clients' rows (train, validation and test parts over the same clients) and all that they keep."""

    def __init__(
        self, parts: Mapping[Part, Clients], roster: Roster, program: Program, simulator: Simulator | None = None
    ) -> None:
        none = replace(parts["train"], size=torch.zeros_like(parts["train"].size))
        self.parts: Mapping[Part, Clients] = {"validation": none, **parts}  # nobody must have set rows aside
        self.roster, self.program = roster, program
        self.simulator = simulator or Simulator()
        if not torch.equal(parts["train"].ids, roster.ids):
            raise ValueError("a shard's roster lists the clients of its data, in their order")
        too_large = (parts["train"].size > roster.bound).nonzero().flatten()
        if len(too_large):
            first = int(too_large[0])
            raise ValueError(
                f"client {roster.name(first)} has {int(parts['train'].size[first])} rows, but declared at most "
                f"{int(roster.bound[first])}; raise its declared size, or leave rows out"
            )
        self._kept: dict[str, KeptStore] = {}
        self._dry_runs: dict[Hashable, DryRun | None] = {}
        self._order = torch.argsort(roster.ids)
        self._sorted = roster.ids[self._order].numpy()

    def positions(self, ids: Tensor) -> Tensor:
        """Where these clients are in this shard; ``Refused`` if one is not here."""
        asked = ids.numpy()
        place = np.minimum(np.searchsorted(self._sorted, asked), len(self._sorted) - 1)
        strangers = self._sorted[place] != asked
        if np.count_nonzero(strangers):
            raise Refused(f"client {int(asked[strangers][0])} does not live here")
        ascending = np.sort(place)
        if np.count_nonzero(ascending[1:] == ascending[:-1]):
            raise Refused("a request names a client twice, which would count it twice in a sum")
        return self._order[torch.from_numpy(place)]

    def answer(self, request: Request, kept: KeptStore | None = None) -> Iterator[Reply]:
        """Run a request: rows of individual releases as they come, then one partial for each sum.

        kept: where its clients keep things, in place of the run's own store.
        """
        work = self._work(request, self.kept(request.run) if kept is None else kept)
        if work.private and (bad := _not_finite({**request.shared, **request.each})) is not None:
            why = Diverged(f"refused: the input {bad!r} is not finite (NaN or infinite)")
            yield request.reply(failed=dict.fromkeys(range(len(request.ids)), why))
            return
        if work.terms.at_shard:
            work = replace(work, releases=self._in_numbers(request, work))
        adders = {place: Adder(one) for place, one in enumerate(work.releases) if is_summed(one)}
        shapes: list[dict[str, tuple[int, ...]]] | None = None
        lost: list[int] = []  # rows of clients that failed, where nobody may see that
        for reply in self.simulator.run(work):
            if len(reply.rows):
                own = reply.shapes()
                shapes = shapes or own
                if own != shapes:
                    reason = f"sent arrays of shapes {own}, but others sent {shapes}"
                    reply = request.reply(failed={**reply.failed, **dict.fromkeys(reply.rows.tolist(), reason)})
            if work.private and reply.failed:
                self._warn_of(work, reply.failed)
                lost += reply.failed
                reply = replace(reply, failed={})
            yield self._add_up(request, work, adders, reply)
        if lost:
            yield from self._reply_zeros(request, work, adders, sorted(lost), shapes)
        partials = {
            place: self._with_noise(request, work, place, made)
            for place, adder in adders.items()
            if (made := adder.partial()) is not None
        }
        if partials:
            yield request.reply(partials=partials)

    def _add_up(self, request: Request, work: Work, adders: Mapping[int, Adder], reply: Reply) -> Reply:
        """The reply of some clients, of which sums are taken out and added up."""
        arrays = list(reply.arrays)
        for place, adder in adders.items() if arrays else ():
            if len(reply.rows):
                adder.add(arrays[place], work.bounds[reply.rows])
            arrays[place] = {}
        return request.reply(reply.rows, arrays, reply.failed)

    def _warn_of(self, work: Work, failed: Mapping[int, str]) -> None:
        """Warn here, where the clients live; nothing of it is sent."""
        row, reason = next(iter(failed.items()))
        name = self.roster.name(int(work.positions[row]))
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        warnings.warn(
            f"{work.task.name} failed at client {name}{more}: {reason}; what it releases is private, so zeros were "
            "sent in its place, and the server does not learn of it",
            PrivateFailure,
            stacklevel=2,
        )

    def _reply_zeros(
        self,
        request: Request,
        work: Work,
        adders: Mapping[int, Adder],
        lost: Sequence[int],
        shapes: Sequence[Mapping[str, tuple[int, ...]]] | None,
    ) -> Iterator[Reply]:
        """Replies of clients that failed in a private ask: they contribute zero, and count as answered."""
        for row in torch.tensor(lost)[:, None]:
            each = {name: value[row[0]] for name, value in work.each.items()}
            sent = dry_output(work.task, self.roster.schema, work.bounds[row][0], {**work.shared, **each})
            if sent is None and shapes is not None and not any(getattr(one, "secure", False) for one in work.releases):
                sent = {name: torch.zeros(shape) for release in shapes for name, shape in release.items()}
            if not work.releases:
                sent = {}
            if sent is None:
                yield request.reply(failed={int(row): "did not answer"})
                continue
            yield self._add_up(request, work, adders, zero_reply(work, row, sent))

    def _in_numbers(self, request: Request, work: Work) -> list[Release]:
        """The releases with numbers for the bounds of sums, whose noise is made here; before anything is computed."""
        declared = self.roster.declarations(work.positions)
        try:
            return [one.resolve(request.shared, declared) if isinstance(one, Sum) else one for one in work.releases]
        except (KeyError, ValueError, RuntimeError, ArithmeticError) as error:
            raise Refused(f"{request.task}: its inputs give no bound for its noise: {error!r}") from error

    def _with_noise(self, request: Request, work: Work, place: int, partial: Partial) -> Partial:
        """A part of a sum as it may leave: with the whole noise, unless the server is trusted to add it."""
        terms, release = work.terms, work.releases[place]
        if not terms.at_shard or not isinstance(release, Sum):
            return partial
        draws = SystemDraws() if terms.system else Draws(key(request.key, -1, int(request.ids[0])), place)
        return replace(partial, total=release.noisy(partial.total, Everyone(terms.relation), draws))

    def _work(self, request: Request, kept: KeptStore) -> Work:
        task = self.program.task(request.task)
        if self.program.is_exchange(request.task) and (request.purpose != "train" or "/" in request.run):
            raise Refused(f"{request.task} is an exchange of a secure sum, which a run makes while it trains only")
        if request.part not in self.parts:
            raise Refused(f"the clients here have no {request.part} rows")
        positions = self.positions(request.ids)
        bounds = self.roster.bound[positions]
        derived = task.derive_inputs(self.roster, positions)
        given = [*request.shared, *request.each, *request.held]
        if set(given) & set(derived):
            raise Refused(f"{request.task} derives {', '.join(derived)} at the client; a request cannot set it")
        if len(set(given)) < len(given):
            raise Refused(f"a request gives {request.task} one input in two ways: {', '.join(sorted(given))}")
        task.check_inputs({*given, *derived})
        held = {name: self.look(request.run, handle, request.ids) for name, handle in request.held.items()}
        clients = self.parts[request.part] if request.labels else self.parts[request.part].without_labels()
        terms, releases = self.program.terms, self.program.releases(request)
        check_held(request.task, request.held, releases)
        each = {**request.each, **held, **derived}
        # the request's key is known to the server that chose it
        own = SystemDraws().bits(1)[0] if terms.system else torch.tensor(request.key)
        private = protects(releases) or self.program.hides(request)
        if private and not self.program.open:
            self._check_private(request, task, releases, {name: value[0] for name, value in each.items()})
        return Work(
            task, clients, positions, bounds, request.shared, each, releases, own, kept, request.serial, terms, private
        )

    def _check_private(
        self, request: Request, task: Task, releases: Sequence[Release], own: Mapping[str, Tensor]
    ) -> None:
        """Refuse what would show more than noise protects, whatever the rows are.

        A task that does not run on rows of zeros, with inputs of these shapes: who fails would show, or how many rows
        a client has, whose rows an input of as many rows could repeat. Noise is made for the rows that were declared.
        """
        if request.part != "train" and protects(releases):
            raise Refused(f"{task.name}: noise is made for the declared training rows, not for those of {request.part}")
        terms = self.program.terms
        if terms.at_shard and terms.cohort is None and any(getattr(one, "secure", False) for one in releases):
            raise Refused(f"{task.name}: the recipe does not say how many clients share the noise of a secure sum")
        one = {**request.shared, **{name: torch.zeros_like(value) for name, value in own.items()}}
        half = [name for name, value in one.items() if value.dtype in (torch.float16, torch.bfloat16)]
        if half:
            raise Refused(f"{task.name}: {half[0]} is in half precision, in which bounds do not hold")
        kind = (task.name, request.wanted, *((name, value.shape, value.dtype) for name, value in one.items()))
        if kind not in self._dry_runs:
            self._dry_runs[kind] = dry_run(task, releases, self.roster.schema, self.roster.bound[0], one)
        dry = self._dry_runs[kind]
        if not releases:
            charged = any(one.cost is not None for one in task.releases()) or (dry is not None and dry.noisy)
            if charged:  # what it keeps would be trained once more, for nothing, and a later ask would show it
                raise Refused(f"{task.name} draws noise, and what it releases names its cost: ask it for that")
            return
        if dry is None:
            raise Refused(f"the run states an ε, and {task.name} does not run on rows of zeros, so failures would show")
        try:
            check_private(task, releases, dry)
        except ValueError as error:
            raise Refused(str(error)) from error

    def look(self, run: str, handle: str, ids: Tensor) -> Tensor:
        """The arrays that these clients hold under a handle."""
        found = self.kept(run).column(HELD + handle, ids)
        if found is None or not bool(found[1].all()):
            raise Refused(f"some of the clients hold nothing under {handle!r}; an earlier ask has to leave it there")
        return found[0]

    def use(self, schema: Schema) -> None:
        """Read the same rows by another scaling; ``Refused`` if the rows themselves would have to be others."""
        if replace(self.roster.schema, **{name: getattr(schema, name) for name in SCALING}) != schema:
            raise Refused("the schema is one of other rows; only the scaling of inputs and targets may change")
        self.parts = {name: part.using(schema) for name, part in self.parts.items()}
        self.roster = replace(self.roster, schema=schema)

    def kept(self, run: str) -> KeptStore:
        """What clients keep for a run; "a/3" reads through to "a" and never changes it."""
        if run not in self._kept:
            main, beside, _ = run.partition("/")
            self._kept[run] = KeptStore(self.kept(main), secrets=False) if beside else KeptStore()
            asides = [name for name in self._kept if "/" in name]
            for old in asides[: max(0, len(asides) - ASIDES)]:
                del self._kept[old]
        return self._kept[run]

    def forget(self, run: str, prefix: str = "") -> None:
        """Of a run, what is kept under names that begin so; all of it without a prefix."""
        if prefix:
            self.kept(run).drop(prefix)
        else:
            self._kept.pop(run, None)

    def restore(self, run: str, state: Mapping[str, Tensor]) -> None:
        self._kept[run] = KeptStore.from_state(state)


def _not_finite(inputs: Mapping[str, Tensor]) -> str | None:
    """The name of an input that holds NaN or an infinity, if one does."""
    floats = (name for name, value in inputs.items() if value.is_floating_point())
    return next((name for name in floats if not bool(torch.isfinite(inputs[name]).all())), None)
