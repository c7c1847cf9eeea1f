"""Joint privacy: owners who share some parameters and keep the others; what of it is private, and why.

Owners j = 1..n hold data S_j of many users. They share the parameters u; each keeps parameters x_j of its own.
*Jointly* private [Huang et al. 2023, Def. 2.2]: whatever all owners but j see or make, (u, x_i for i != j), hardly
changes when the data of one unit at owner j changes. Owner j's own model may use its own data freely.

**The billboard.** Let M be (epsilon, delta)-DP for a unit, and let it write what it releases, u_1, u_2, .., u, where
all can read it. Let x_i = F_i(u_1, .., u, S_i, draws of i) for every owner i. Then the x_i together are jointly
(epsilon, delta)-DP for a unit that has data at one owner, j: for S, S' that differ in it, S_i = S'_i for all i != j,
so (u, x_i for i != j) is one randomised function of the billboard, which is DP: post-processing. QED. x_j itself may
be anything: it needs no noise, and is covered by nothing, so owner j must show it to nobody.

What the proof needs is that M is DP *by itself*: that what reaches the billboard depends on the unit's data only in
ways that M's analysis counts. Two functions here keep to that, each for its own reason, in its docstring:
`owner_level`, where the unit is all that an owner has, and `two_phase`, where M never reads an x.

**Clipping each record while x_j is trained without noise is not enough**, though it looks like both. Say that in
round t owner j sends sum over its m records z of clip(grad_u h(x_j, u, z)), with noise for one clipped gradient, and
that x_j was trained on those records. Another record z' in place of z in round 1 makes another x_j, and with it each
of the m terms of every later round: sums move by up to 2 m clip norms, in every round, where 2 are accounted for. The
record speaks through x_j long after it was drawn. Convexity may bound how far x_j moves; for networks nothing does,
and an attack shows it: `python -m reproductions.joint_algorithm1`.

The functions are simulations: all owners in one process, `Joint.personal` side by side. In deployment the part of an
owner runs at the owner, and its entry of `personal` is there and nowhere else.
"""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from anyorder import checks
from anyorder.checks import final
from anyorder.errors import ArgumentError
from anyorder.federated.clients import Examples
from anyorder.federated.server import Layout, Server
from anyorder.plan.certificate import Certificate

__all__ = ["Joint", "Local", "Split", "Train", "fed_avg", "full_dp", "owner_level", "silo", "split", "two_phase"]

Local = Callable[[nn.Module, Layout, Examples, int], Tensor]
"""(model, layout, examples, seed) -> (layout.size,), how far training on the examples moves the layout's parameters.

All others stay. `LocalTraining(..).change` is one.
"""

Train = Callable[[nn.Module, list[nn.Parameter]], Certificate]
"""(model, parameters) -> certificate: trains these parameters of the model privately, in place, by any front end."""

Owner = int | str
Values = dict[str, Tensor]


class Split(NamedTuple):
    """Names of parameters, in the model's order.

    Attributes:
        shared: trained together; released.
        personal: of each owner; never leave it.
    """

    shared: tuple[str, ...]
    personal: tuple[str, ...]


def split(model: nn.Module, personal: Sequence[str]) -> Split:
    """Return which parameters are shared, and which are personal.

    Args:
        model: the owners' common architecture.
        personal: patterns of names as in a shell, "fc1.*" or "*.bias"; case counts. Empty: all are shared.
    Returns: the names. What matches is personal; the others are shared, but frozen ones, which are neither.
    Raises: ArgumentError for a pattern that fits no parameter (a misspelt one would share what was to stay at home),
        and for a tensor with two names of which one fits.
    """
    if isinstance(personal, str):
        raise ArgumentError(f"personal must be a list of patterns, got the string {personal!r}: write [{personal!r}]")
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    for pattern in personal:
        if not any(fnmatch.fnmatchcase(name, pattern) for tied in names.values() for name in tied):
            known = ", ".join(tied[0] for tied in names.values())
            raise ArgumentError(f"personal pattern {pattern!r} must fit a parameter's name, but fits none of {known}")
    shared, own = [], []
    for tied in names.values():
        fits = [any(fnmatch.fnmatchcase(name, pattern) for pattern in personal) for name in tied]
        if any(fits) != all(fits):
            raise ArgumentError(f"{' and '.join(tied)} are one tensor: all its names must be personal, or none")
        if fits[0]:
            own.append(tied[0])
        elif model.get_parameter(tied[0]).requires_grad:
            shared.append(tied[0])
    return Split(tuple(shared), tuple(own))


@final
@dataclass(frozen=True)
class Joint:
    """The models that owners have after they learned.

    Attributes:
        model: with the shared parameters. Its personal parameters and its buffers are those from before: of nobody.
        personal: {owner: {name: tensor}}: each for its owner alone.
        certificate: of what was shared, or None where nothing is claimed.
    """

    model: nn.Module
    personal: Mapping[Owner, Values] = field(repr=False)  # what is printed is seen by others
    certificate: Certificate | None = None

    def model_of(self, owner: Owner) -> nn.Module:
        """A copy of the model with the personal parameters of an owner: to be used by that owner."""
        if owner not in self.personal:
            raise ArgumentError(f"owner must be one of the {len(self.personal)} that took part, got another")
        return _copy(self.model, self.personal[owner])


# -- offered as private ----------------------------------------------------------------------------------------------


def two_phase(
    model: nn.Module,
    owners: Mapping[Any, Examples],
    train: Train,
    fit: Local,
    *,
    personal: Sequence[str],
    seed: int = 0,
) -> Joint:
    """First the shared parameters are trained privately, then each owner fits its personal ones, at home.

        u = M(S_1, .., S_n),    x_j = fit(u, S_j)

    In the first phase personal parameters stand still, where they began: at public values, the same for all. Make
    those useful (a second head: zeros), as the shared part learns around them.

    Args:
        model: where all begin; not written.
        owners: {owner: (x, y)}, the data of each.
        train: trains shared parameters of a copy of `model` privately and returns the certificate. With an engine:

                def train(model, parameters):
                    engine = ao.PrivacyEngine(plan)
                    private, optimizer, loader = engine.make_private(model, SGD(parameters, lr=1.0), loader_of_all)
                    ...                                 # the usual loop
                    return engine.certificate()

            It may as well be a `Server` of users or owners; the unit is that of its plan.
        fit: trains the personal parameters.
        personal: patterns, as in `split`.
        seed: of the order in which owners read their data. No privacy rests on it.
    Guarantee: jointly DP with the epsilon, delta and unit of the certificate, for units with data at one owner. Proof:
        the billboard (top of this module). M is DP by its own analysis, since x's it never reads: in the first phase
        there are none. The second phase reads u and one owner's data. If one owner's unit has data at a second one, i,
        then x_i is not covered: owner i has that data, and may do with it what it likes.
    Returns: shared model, personal parameters, the certificate of the first phase.
    Raises: ArgumentError if train returns no certificate, or changed what is personal: that would be a release
        without noise.
    """
    names = split(model, personal)
    _some(names.shared, "shared")
    learner = _copy(model, {})
    for name in names.personal:
        learner.get_parameter(name).requires_grad_(False)
    certificate = train(learner, [learner.get_parameter(name) for name in names.shared])
    if not isinstance(certificate, Certificate):
        raise ArgumentError(f"train must return the certificate of its private run, got {type(certificate).__name__}")
    for name in names.personal:
        if not torch.allclose(learner.get_parameter(name), model.get_parameter(name), 0, 0, equal_nan=True):
            raise ArgumentError(f"train must leave what is personal as it is, but changed {name}: no noise covers that")
    public = _copy(model, _values(learner, names.shared))
    return Joint(public, _fit_all(public, owners, fit, names.personal, {}, seed), certificate)


def owner_level(
    server: Server,
    owners: Mapping[Any, Examples],
    change: Local,
    fit: Local,
    *,
    personal: Sequence[str],
    seed: int = 0,
) -> Joint:
    """Owners alternate: fit the personal part, then send a change of the shared one, which is clipped as one.

        round t:   x_j <- x_j + fit(x_j, u_t, S_j);    message d_j = change(x_j, u_t, S_j), of owner j
                   u_{t+1} = u_t + step( sum over j of clip(d_j), plus noise )

    and, after the last round, each owner fits its personal part once more.

    Args:
        server: an `ao.federated.Server` whose plan's unit is "owner" and whose optimizer holds the shared parameters,
            those that are not `personal`. It runs to the plan's last step; owners that the plan lets take part do.
        owners: {owner: (x, y)}, the data of each.
        change: trains the shared parameters for a message.
        fit: trains the personal parameters.
        personal: patterns, as in `split`.
        seed: of the order in which owners read their data. No privacy rests on it.
    Guarantee: jointly (epsilon, delta)-DP for everything that one owner has, by the server's certificate, and so for
        each of its users and records, whatever an owner's training does. Proof: owner j's messages are functions of
        S_j, of its own state x_j, and of the billboard u_1, .., u_t. In every round its message is clipped to the clip
        norm, so the sum moves by at most that (twice that, where owners are replaced) when all of S_j does. That is
        what the plan accounts for in each participation, over adaptive rounds: x_j may carry anything from round to
        round, as no matter what it carries the message is in the ball. Other owners' messages and x_i are functions of
        the billboard and of S_i. QED by the billboard.
    A server's checkpoint holds what is shared and no personal parameters: in deployment each owner keeps its own. Here
        a simulation that is killed and goes on with the server's next round begins the personal parts again.
    Cost: the noise is that of n owners, not of their records: few owners learn little from each other this way.
    Returns: the server's model, personal parameters, the server's certificate.
    Raises: ArgumentError for a plan of another unit, and for an optimizer that holds other parameters.
    """
    if server.plan.unit != "owner":
        raise ArgumentError(
            f"the server's plan must protect unit 'owner', as a message is about all data of one, got "
            f"{server.plan.unit!r}: for users or records at owners use two_phase"
        )
    names = split(server.model, personal)
    if set(server.layout.shapes) != set(names.shared):
        raise ArgumentError(
            f"the server's optimizer must hold the {len(names.shared)} shared parameters and no others, but holds "
            f"{', '.join(server.layout.shapes)}"
        )
    begin = _values(server.model, names.personal)
    own: dict[Owner, Values] = dict.fromkeys(owners, begin)
    layout = server.layout
    ids = list(owners)
    while server.step < server.plan.n:
        t = server.step
        with server.open() as round_:
            for place in np.flatnonzero(server.eligible(ids)):
                owner = ids[place]
                seeds = _seeds(seed, t, int(place))
                own[owner] = _fitted(server.model, own[owner], owners[owner], fit, seeds[0])
                local = _copy(server.model, own[owner])
                round_.add(owner, layout.named(change(local, layout, owners[owner], seeds[1])))
    public = _copy(server.model, begin)
    return Joint(public, _fit_all(public, owners, fit, names.personal, own, seed), server.certificate())


# -- to compare with -------------------------------------------------------------------------------------------------


def full_dp(model: nn.Module, owners: Mapping[Any, Examples], train: Train) -> Joint:
    """Nothing is personal: one model for all, every parameter of it trained privately. See `two_phase`."""

    def nothing(model: nn.Module, layout: Layout, examples: Examples, seed: int) -> Tensor:
        del model, examples, seed
        return torch.zeros(layout.size)

    return two_phase(model, owners, train, nothing, personal=[])


def silo(model: nn.Module, owners: Mapping[Any, Examples], fit: Local, *, seed: int = 0) -> Joint:
    """Each owner alone: everything is personal, and nothing is shared. Jointly DP with epsilon 0."""
    names = split(model, []).shared
    public = _copy(model, {})
    return Joint(public, _fit_all(public, owners, fit, names, {}, seed))


def fed_avg(model: nn.Module, owners: Mapping[Any, Examples], change: Local, *, rounds: int, seed: int = 0) -> Joint:
    """Federated averaging [McMahan et al. 2017], all owners in every round, weights by examples. **Not private.**

    u <- u + sum over j of (m_j / N) change(u, S_j)
    """
    rounds = checks.integer("rounds", rounds, low=1)
    names = split(model, []).shared
    public = _copy(model, {})
    layout = Layout.of({name: public.get_parameter(name) for name in names})
    count = sum(len(y) for _, y in owners.values())
    for t in range(rounds):
        total = torch.zeros(layout.size)
        for place, (x, y) in enumerate(owners.values()):
            total += len(y) / count * change(_copy(public, {}), layout, (x, y), _seeds(seed, t, place)[1])
        _add(public, layout, total)
    return Joint(public, {owner: {} for owner in owners})


# -- an owner's part -------------------------------------------------------------------------------------------------


def _fit_all(
    public: nn.Module,
    owners: Mapping[Any, Examples],
    fit: Local,
    names: tuple[str, ...],
    begin: Mapping[Owner, Values],
    seed: int,
) -> dict[Owner, Values]:
    """Every owner's personal part, fitted to the shared one: the last thing that happens. The shared part stands."""
    start = _values(public, names)
    return {
        owner: _fitted(public, begin.get(owner, start), examples, fit, _seeds(seed, 2**32 - 1, place)[0])
        for place, (owner, examples) in enumerate(owners.items())
    }


def _fitted(public: nn.Module, own: Values, examples: Examples, fit: Local, seed: int) -> Values:
    if not own:
        return {}
    local = _copy(public, own)
    layout = Layout.of({name: local.get_parameter(name) for name in own})
    moved = layout.named(fit(local, layout, examples, seed))
    return {name: value + moved[name].to(value) for name, value in own.items()}


def _copy(model: nn.Module, values: Values) -> nn.Module:
    """A model of its own with these values of parameters, all others and the buffers as they are."""
    copied = deepcopy(model)
    with torch.no_grad():
        for name, value in values.items():
            copied.get_parameter(name).requires_grad_(True).copy_(value)
    return copied


def _values(model: nn.Module, names: tuple[str, ...]) -> Values:
    return {name: model.get_parameter(name).detach().clone() for name in names}


def _add(model: nn.Module, layout: Layout, change: Tensor) -> None:
    with torch.no_grad():
        for name, moved in layout.named(change).items():
            model.get_parameter(name).add_(moved.to(model.get_parameter(name)))


def _seeds(seed: int, t: int, place: int) -> tuple[int, int]:
    """For the fit and for the change of an owner in a round: others for each."""
    first, second = np.random.SeedSequence([seed, t, place]).generate_state(2).tolist()
    return first, second


def _some(names: tuple[str, ...], kind: str) -> None:
    if not names:
        raise ArgumentError(f"some parameter must be {kind}, but the patterns of personal leave none")
