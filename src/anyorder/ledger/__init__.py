"""The ledger: which unit took part at which step. It refuses what the plan's participation does not cover."""

from anyorder.ledger.ids import Units, as_units, canonical_bytes, numbered
from anyorder.ledger.record import Ledger, allows, replay

__all__ = ["Ledger", "Units", "allows", "as_units", "canonical_bytes", "numbered", "replay"]
