"""What an accountant says of a training, beside what the order of its data allows: `ao.check`, `anyorder check`.

streams, arrivals   what samplers and loaders say of who comes when
naming              examples by one name each, and what is read without a trace
visits              how often a unit comes, and the epsilon that follows
finding             `check`: claimed, true
seen, watching      `watch`: who really came
planned             the claim of an engine of this package, where nothing was seen beside it
runner              a script that is watched
"""

from anyorder.audit.checking.finding import Finding, check
from anyorder.audit.checking.seen import Seen
from anyorder.audit.checking.watching import Watch, Watched, watch

__all__ = ["Finding", "Seen", "Watch", "Watched", "check", "watch"]
