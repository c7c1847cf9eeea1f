"""`anyorder verify`."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from anyorder.accounting.amplification.claims import Amplified, fresh_interval, watched
from anyorder.accounting.curves import Curve, Gaussian, compose
from anyorder.app import report as audit_files
from anyorder.app.cards import card, facts_panel, receipt_facts, search_verdict, verdict
from anyorder.app.cli.common import Json, one_line_errors, print_json
from anyorder.app.exits import ExitCode, fail
from anyorder.app.waiting import Steps
from anyorder.budget.claim import FORMAT as SEARCH
from anyorder.budget.claim import SearchCertificate
from anyorder.errors import AnyorderError, ArgumentError, CertificateError, LimitError
from anyorder.formats import mentions
from anyorder.formatting import counted, rounded_down, rounded_up
from anyorder.plan.certificate import PUBLIC_STOP, Certificate, Realised
from anyorder.plan.certificate import verify as verify_file
from anyorder.plan.plan import CANDIDATE, Plan
from anyorder.plan.receipt import Receipt

__all__ = ["verify"]


@one_line_errors
def verify(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="A certificate (run.privacy.json, search.privacy.json) or a plan (plan.json): public files. Several: "
            "what applies to those who are in all of them."
        ),
    ],
    evidence: Annotated[
        Path | None,
        typer.Option(
            help="The certificate's evidence (run.evidence.json), which its owner keeps as secret as the data."
        ),
    ] = None,
    receipt: Annotated[
        list[Path] | None,
        typer.Option(
            help="One unit's receipt from the run's owner: its steps and its own mu. With several "
            "certificates: once for each run in which the unit took part."
        ),
    ] = None,
    audit: Annotated[
        Path | None, typer.Option(help="audit.json of a run of the same plan, as anyorder audit run writes it.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="File of the model, whose weights the certificate must name.")
    ] = None,
    large: Annotated[
        bool, typer.Option("--large", help="No bounds on time and memory: for files that you trust, of long runs.")
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="For a claim by samples: also draw new samples and compare."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Recompute every claim of a certificate or plan from the file alone.

    $ anyorder verify runs/digits-20250101-120000/run.privacy.json

    $ anyorder verify run.privacy.json --evidence run.evidence.json

    $ anyorder verify run.privacy.json --receipt mine.receipt.json

    $ anyorder verify first.privacy.json second.privacy.json --receipt
    mine.first.json --receipt mine.second.json

    $ anyorder verify run.privacy.json --audit audits/digits/audit.json

    $ anyorder verify run.privacy.json --model model.pt

    The evidence shows that every unit kept to the order. A receipt shows one
    unit's steps and its own mu. An audit must be of the same plan, and not
    have refuted its claim. A model must have the weights that the
    certificate names. No file can show that the noise was added, and that
    order, units and clipping were what the file says.

    For a search (search.privacy.json) the epsilon of the whole search is
    recomputed. Several certificates are checked one by one, and composed
    for people who are in all of them.

    Exit code 0 if all holds, 1 if anything does not, the file cannot be read, or
    it takes more time than a stranger's file is given: then pass --large.
    """
    receipts = receipt or []
    if len(files) > 1:
        if (evidence, audit, model) != (None, None, None) or fresh:
            raise ArgumentError("evidence, audit, model and --fresh belong to one file: give it alone")
        _verify_together(files, receipts, large, as_json)
        return
    if len(receipts) > 1:
        raise ArgumentError("several receipts belong to several certificates, and one file was given")
    file, receipt_file = files[0], receipts[0] if receipts else None
    try:
        if mentions(file, f'"{SEARCH}"', large=large):
            if (evidence, receipt_file, audit, model) != (None, None, None, None):
                raise ArgumentError("evidence, receipt, audit and model belong to a run, and the file is of a search")
            _verify_search(file, large, as_json)
            return
        with _bar() as tell, watched(tell):
            found = verify_file(file, evidence=evidence, receipt=receipt_file, large=large)
            drawn = _drawn_again(found.plan) if fresh else None
        attacked = None if audit is None else audit_files.read(audit, found.plan)
        named = None if model is None else _named(found.certificate, model)
    except AnyorderError as problem:
        if as_json:
            print_json({"ok": False, "file": str(file), "problem": str(problem)})
            raise typer.Exit(ExitCode.FAILED) from problem
        if isinstance(problem, LimitError):
            fail(f"NOT checked to its end, and nothing in it is known to be wrong: {problem}", ExitCode.FAILED)
        fail(f"NOT verified: {problem}", ExitCode.FAILED)
    checked, unseen = verdict(found, fresh)
    if attacked is not None:
        checked.append(f"as its file says: {attacked}")
    checked += [one for one in (drawn, named) if one is not None]
    plan, certificate, own = found.plan, found.certificate, found.receipt
    if as_json:
        steps = None if certificate is None else certificate.steps
        outcome = {"ok": True, "file": str(file), "claims": plan.claims(), "checked": checked, "not_checked": unseen}
        mine = None if own is None else {"unit": own.unit, "steps": own.steps, "mu": own.mu}
        after = None if certificate is None or certificate.realised is None else certificate.realised.to_dict()
        starts = certificate.earlier if certificate is not None else ()
        if certificate is not None and starts:
            outcome["claims"] = {**plan.claims(), "epsilon": certificate.epsilon, "mu": certificate.curve.mu}
            outcome["started_over"] = [steps for _, steps in starts]
        searched = {} if plan.candidate_of is None else {"candidate_of": plan.candidate_of}
        receipt_of = {} if mine is None else {"receipt": mine}
        print_json({**outcome, "steps": steps, "realised": after, **searched, **receipt_of})
        return
    console = Console()
    console.print(card(plan if certificate is None else certificate))
    for text in checked:
        console.print(f"ok  {text}", highlight=False, markup=False)
    for text in unseen:
        console.print(f"--  not checked: {text}", highlight=False, markup=False)
    if own is not None:
        console.print(facts_panel("receipt", receipt_facts(own, plan)))
    kind = "plan" if certificate is None else "certificate"
    epsilon = plan.epsilon if certificate is None else certificate.epsilon
    promise, style = f"epsilon <= {rounded_up(epsilon)} at delta = {rounded_up(plan.delta, 6)}", "green"
    if certificate is not None and certificate.realised is not None:
        told, sound = _realised(certificate, certificate.realised, found.evidence is not None)
        promise, style = f"{promise}{told}", "green" if sound else "yellow"
    if plan.candidate_of is not None:
        promise, style = f"{promise}, of a run by itself. It is {CANDIDATE}", "yellow"
    console.print(f"verified: this {kind} claims {promise}", style=style)


def _realised(certificate: Certificate, realised: Realised, backed: bool) -> tuple[str, bool]:
    """What is said of a realised epsilon that is another number, and whether it may pass for a good result.

    Args:
        backed: by the evidence, which has who took part.
    """
    epsilon, steps = rounded_up(realised.epsilon), counted(certificate.steps, "step")
    if realised.says_nobody(certificate.steps):
        told = "as the evidence has it" if backed else "which is unchecked and implausible. Rest on the planned epsilon"
        return f". Nobody took part in any of {steps}, {told}", False
    if epsilon == rounded_up(certificate.epsilon):
        return "", True
    record = "the evidence" if backed else "the file's own unchecked record"
    return f". Realised epsilon, by {record}: <= {epsilon}", True


def _own(found: list[Certificate], receipts: list[Path], large: bool) -> dict[str, Receipt]:
    """One unit's receipts by the run's key, each held against its certificate. Raises: CertificateError."""
    own: dict[str, Receipt] = {}
    for path in receipts:
        one, problem = Receipt.load(path, large=large), None
        for certificate in found:
            try:
                certificate.check(one, large=large)
            except CertificateError as what:
                problem = what
            else:
                break
        else:
            raise CertificateError(f"the receipt {path} belongs to none of the certificates: {problem}")
        if certificate.key_fingerprint in own:
            raise CertificateError(f"the receipt {path} is a second one of one run: give one for each run")
        own[certificate.key_fingerprint] = one
    if len({one.unit for one in own.values()}) > 1:
        raise CertificateError("the receipts are of several units: those of one unit are counted together")
    return own


def _ended_unstated(certificate: Certificate) -> bool:
    """Whether a run stopped early for a reason that its owner does not state."""
    return certificate.steps < certificate.plan.n and PUBLIC_STOP not in certificate.stated


def _of_unit(certificate: Certificate, own: Receipt | None) -> Curve:
    """What a run tells of this unit: by its receipt, which is of the last start alone; else of any unit.

    Under secret sampling mu of a receipt is against those who know the steps: there the run's own curve counts. So it
    does where the run stopped early and its owner does not state that the stop was not chosen by what was released: mu
    of the steps before the stop is no claim then, as nothing realised is.
    """
    if own is None or _ended_unstated(certificate) or certificate.plan.participation.secret:
        return certificate.curve
    plan = certificate.plan
    mine = Gaussian(own.mu, neighbours=plan.neighbours, unit=plan.unit)
    return compose(mine, *certificate.curves_before) if certificate.earlier else mine


def _verify_together(files: list[Path], receipts: list[Path], large: bool, as_json: bool) -> None:
    """Each certificate, and what they claim together. The same people are in all of them, at worst.

    With receipts of one unit: what they claim of it, in how many steps of each run it took part.
    """
    try:
        found = [Certificate.load(file, large=large) for file in files]
        if len({one.key_fingerprint for one in found}) < len(found):
            raise CertificateError(
                "two of the certificates are of one noise key: of one run, which counts once, or of two that used the "
                "same noise, of which nothing can be claimed"
            )
        own = _own(found, receipts, large)
        together, delta = (
            compose(*(_of_unit(one, own.get(one.key_fingerprint)) for one in found)),
            max(one.plan.delta for one in found),
        )
        epsilon = together.epsilon(delta)
    except AnyorderError as problem:
        if as_json:
            print_json({"ok": False, "files": [str(file) for file in files], "problem": str(problem)})
            raise typer.Exit(ExitCode.FAILED) from problem
        fail(f"NOT verified: {problem}", ExitCode.FAILED)
    if as_json:
        each = [{"file": str(file), "claims": one.plan.claims()} for file, one in zip(files, found, strict=True)]
        print_json({"ok": True, "files": each, "together": {"epsilon": epsilon, "delta": delta, "mu": together.mu}})
        return
    console = Console()
    for file, one in zip(files, found, strict=True):
        claim = f"epsilon <= {rounded_up(one.epsilon)} at delta = {rounded_up(one.plan.delta, 6)}"
        console.print(f"ok  {file}: {claim}", highlight=False, markup=False, soft_wrap=True)
    console.print(
        "--  not checked: that the runs were on the same people, that there were no others, and that no plan was "
        "chosen by what an earlier run released (for that there is anyorder budget)", highlight=False, markup=False,
    )  # fmt: skip
    for file, one in zip(files, found, strict=True):
        mine = own.get(one.key_fingerprint)
        told = "no receipt: counts as for anybody" if mine is None else f"in {counted(len(mine.steps), 'step')}"
        if mine is not None and _ended_unstated(one):
            told += ", and why the run stopped early is not stated: counts as for anybody"
        if own:
            mark = "--" if mine is None else "ok"
            console.print(f"{mark}  {file}: the unit: {told}", highlight=False, markup=False, soft_wrap=True)
    whom = f"the {found[0].plan.unit} of the receipts" if own else f"one {found[0].plan.unit} in all of them"
    promise = f"epsilon <= {rounded_up(epsilon)} at delta = {rounded_up(delta, 6)}, for {whom}"
    console.print(f"verified: together they claim {promise}", style="green")


def _named(certificate: Certificate | None, model: Path) -> str:
    """What is known of the model after it was held against the certificate. Raises: CertificateError."""
    from anyorder.release.weights import check_model  # with torch, which other checks do without

    check_model(certificate, model)
    return f"that {model.name} has the weights which the certificate names"


def _drawn_again(plan: Plan) -> str:
    """What fresh samples say of a claim by samples. Raises: CertificateError where they show more than it claims."""
    curve = plan.curve
    limits = None
    if type(curve) is Amplified:
        limits = fresh_interval(curve, plan.delta, secrets.randbits(62))
    if limits is None:
        return "nothing to draw afresh: this claim is not by samples, and has no chance in it"
    if limits.lower > plan.epsilon:
        raise CertificateError(
            f"the claim epsilon = {plan.epsilon:.6g} is below {rounded_down(limits.lower, 6)}, which fresh samples "
            "show but for a chance of 0.001: its own were chosen, or unlucky"
        )
    span = f"{rounded_down(limits.lower, 5)} to {rounded_up(limits.upper, 5)}"
    return f"fresh samples, which nobody chose: epsilon from {span}"


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, that shows itself once samples are drawn."""
    bar = Steps(*Steps.get_default_columns(), transient=True)
    task = bar.add_task("samples", total=None)

    def tell(done: int, total: int) -> None:
        if not bar.live.is_started:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield tell
    finally:
        if bar.live.is_started:
            bar.stop()


def _verify_search(file: Path, large: bool, as_json: bool) -> None:
    found = SearchCertificate.load(file, large=large)
    checked, unseen = search_verdict(found)
    if as_json:
        outcome = {"ok": True, "file": str(file), "claims": found.claims(), "checked": checked, "not_checked": unseen}
        print_json({**outcome, "search": found.claim.to_dict(), "settings": found.settings})
        return
    console = Console()
    console.print(facts_panel("search", found.facts()))
    for text in checked:
        console.print(f"ok  {text}", highlight=False, markup=False)
    for text in unseen:
        console.print(f"--  not checked: {text}", highlight=False, markup=False)
    promise = f"epsilon <= {rounded_up(found.epsilon)} at delta = {rounded_up(found.claim.delta, 6)}"
    console.print(f"verified: this search claims {promise}", style="green")
