"""The error tree. Every message says what was wrong, the rule, the value received, and what to do."""

__all__ = [
    "AnyorderError",
    "ArgumentError",
    "BudgetError",
    "CertificateError",
    "CheckpointError",
    "CheckpointWarning",
    "ClippingWarning",
    "IsolationError",
    "LimitError",
    "LoaderError",
    "MissingDependencyError",
    "ModelError",
    "ModelWarning",
    "NoiseWarning",
    "NonFiniteError",
    "OptimizerWarning",
    "ParticipationError",
    "PlanError",
    "SelectionWarning",
    "StepsExhaustedError",
    "TrainingError",
]


class AnyorderError(Exception):
    """Base of all errors of this package."""


class ArgumentError(AnyorderError, ValueError):
    """An argument breaks its rule."""


class PlanError(AnyorderError, ValueError):
    """The parts of a plan do not fit together, or no plan meets the request."""


class BudgetError(AnyorderError, RuntimeError):
    """What a data set has left does not allow it, or the record of it cannot be read or written."""


class LoaderError(PlanError):
    """The order that a loader will use is unknown, or the plan does not cover it."""


class ModelError(AnyorderError, ValueError):
    """The model cannot be trained with a per-unit guarantee."""


class TrainingError(AnyorderError, RuntimeError):
    """The training loop called the parts in an order that the guarantee does not cover."""


class ParticipationError(TrainingError):
    """A unit takes part too early, too often, or where the plan does not expect it."""


class StepsExhaustedError(TrainingError):
    """All planned steps are used."""


class NonFiniteError(TrainingError):
    """Under `non_finite="refuse"`: a unit's gradient is NaN or infinite. No noise covers this message."""


class IsolationError(AnyorderError, AssertionError):
    """A check of isolation found a channel by which one unit reaches more than its own part of its own steps."""


class CheckpointError(AnyorderError, RuntimeError):
    """A checkpoint cannot be written, read, or resumed without harm to privacy.

    Attributes:
        changed: where rows are not those of the run: how many, of how many that were compared. For the owner of the
            data: no message has it.
    """

    changed: tuple[int, int] | None = None


class CertificateError(AnyorderError, ValueError):
    """A plan or certificate file is malformed, or a number in it does not follow from the others."""


class LimitError(CertificateError):
    """A file asks for more time or memory than one of a stranger is given: nothing in it is known to be wrong."""


class MissingDependencyError(AnyorderError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class CheckpointWarning(UserWarning):
    """A run goes on from files that may be a copy: with fresh noise, so not bit for bit as its other copy would."""


class NoiseWarning(UserWarning):
    """The noise is what the plan says, and is made in a slow way, or the plan's delta leaves its promise empty, or a
    step of a pipeline before the model is fitted to the rows without any.
    """


class ClippingWarning(UserWarning):
    """The clipped sums are right, and made in a slow way."""


class ModelWarning(UserWarning):
    """A model would learn nothing, does other things alone than in a batch, keeps something, or lost a layer."""


class OptimizerWarning(UserWarning):
    """The run is private, and noise was fitted to another kind of optimizer, or parameters are frozen without it."""


class SelectionWarning(UserWarning):
    """The choice of rows is private, and by the plan's public numbers of little use."""
