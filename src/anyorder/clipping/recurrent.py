"""The recurrent layers of torch.nn, run such that backward tells what entered and left each of their weights."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyorder.clipping.sweeps import Direction, GruSweep, LstmSweep, Record, RnnSweep
from anyorder.errors import ModelError

__all__ = ["Record", "run_recurrent"]

_KEEP_STATE = (nn.GRU, nn.GRUCell, nn.LSTMCell)
"""Under autocast on the CPU, torch returns these in the dtype of their initial state."""

State = tuple[Tensor, ...]
"""(h,), and (h, c) of an LSTM."""


def run_recurrent(module: nn.RNNBase | nn.RNNCellBase, input: Any, hx: Any, record: Record) -> Any:
    """What `module(input, hx)` returns, attached to autograd; no gradient of a weight is computed.

    Backward calls `record(parameter name in the module, activations (B, T, in), gradients (B, T, out))` once for each
    weight, and with None as activations for each bias, frozen or not. The gradient of example b is

        weight: sum_t gradients[b, t] (x) activations[b, t],    bias: sum_t gradients[b, t].

    The batch comes first whatever `batch_first` says; T is 1 for a cell. The tensors are in the dtype in which the
    layer ran, must not be written, and are one object where two maps have the same gradients (all but the GRU).

    Under autocast the layer runs in autocast's dtype, as oneDNN's and cuDNN's kernels do. Cost: a forward and a
    backward pass without weight gradients, 4 B T H (in + H) multiplications for each pass of an LSTM. Memory: for an
    LSTM 7 B T H numbers until backward, of which 4 B T H are handed to `record`.

    Args:
        module: nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell or nn.RNNCell. Its hooks are not called.
        input: (T, B, in), (B, T, in) with batch_first, (B, in) for a cell.
        hx: initial state as the module takes it, or None for zeros.
        record: see above; called while backward runs.

    Raises:
        ModelError: a PackedSequence or an input without a batch, or another module.
        RuntimeError, ValueError: what the module raises for wrong shapes and dtypes.
    """
    _check_input(module, input)
    if isinstance(module, nn.RNNCellBase):
        return _run_cell(module, input, hx, record)
    return _run_layers(module, input, hx, record)


def _check_input(module: nn.RNNBase | nn.RNNCellBase, input: Any) -> None:
    name = type(module).__name__
    if not isinstance(input, Tensor):
        raise ModelError(
            f"{name} must be given a padded tensor, got a {type(input).__name__}, which joins the examples"
        )
    wanted = 2 if isinstance(module, nn.RNNCellBase) else 3
    if input.dim() != wanted:
        raise ModelError(
            f"{name} must be given a batch, a tensor of {wanted} dimensions, got shape {tuple(input.shape)}, which it "
            "would take for one example: add the dimension that is missing with unsqueeze"
        )


def _run_layers(module: nn.RNNBase, input: Tensor, hx: Any, record: Record) -> tuple[Tensor, Any]:
    if hx is None:
        module.check_input(input, None)
    else:
        module.check_forward_args(input, hx, None)
    x = input.transpose(0, 1) if module.batch_first else input
    if not len(x):
        raise ModelError(f"{type(module).__name__} must be given sequences of at least one step, got none")
    ways = 2 if module.bidirectional else 1
    initial = _initial(hx, x, module.num_layers * ways, x.shape[1], sizes=_sizes(module))
    last: list[State] = []
    for layer in range(module.num_layers):
        outputs = []
        for way in range(ways):
            direction = Direction(f"_l{layer}{'_reverse' if way else ''}", bool(way), record)
            y, state = _sweep(module, direction, x, tuple(states[len(last)] for states in initial))
            outputs.append(y)
            last.append(state)
        x = torch.cat(outputs, dim=-1) if way else outputs[0]
        if layer + 1 < module.num_layers:
            x = F.dropout(x, module.dropout, module.training)
    hidden = tuple(torch.stack(states) for states in zip(*last, strict=True))
    return x.transpose(0, 1) if module.batch_first else x, hidden if isinstance(module, nn.LSTM) else hidden[0]


def _run_cell(module: nn.RNNCellBase, input: Tensor, hx: Any, record: Record) -> Any:
    initial = _initial(hx, input, len(input), sizes=_sizes(module))
    for state, size in zip(initial, _sizes(module), strict=True):
        if state.shape != (len(input), size):
            raise ModelError(
                f"the initial state of {type(module).__name__} must have shape {(len(input), size)}, got "
                f"{tuple(state.shape)}"
            )
    last = _sweep(module, Direction("", False, record), input.unsqueeze(0), initial)[1]
    return last if isinstance(module, nn.LSTMCell) else last[0]


def _sizes(module: nn.RNNBase | nn.RNNCellBase) -> tuple[int, ...]:
    """The sizes of the parts of the state: of h, and for an LSTM of c."""
    if isinstance(module, nn.LSTM):
        return module.proj_size or module.hidden_size, module.hidden_size
    return (module.hidden_size,) * (2 if isinstance(module, nn.LSTMCell) else 1)


def _initial(hx: Any, x: Tensor, *leading: int, sizes: tuple[int, ...]) -> State:
    """The given state, or zeros (*leading, size)."""
    if hx is None:
        return tuple(x.new_zeros(*leading, size) for size in sizes)
    return tuple(hx) if len(sizes) > 1 else (hx,)


def _sweep(
    module: nn.RNNBase | nn.RNNCellBase, direction: Direction, x: Tensor, initial: State
) -> tuple[Tensor, State]:
    """The outputs (T, B, .) of one layer in one direction, and its last state."""
    names = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]
    weights = [getattr(module, name + direction.suffix) if name[0] == "w" or module.bias else None for name in names]
    tensors = [_cast(t) for t in (x, *initial, *weights)]
    dtypes = {t.dtype for t in tensors if t is not None}
    if len(dtypes) > 1:
        raise ModelError(
            f"input, initial state and weights of {type(module).__name__} must have one dtype, got "
            f"{', '.join(sorted(map(str, dtypes)))}: convert with .to()"
        )
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        w_hr = getattr(module, f"weight_hr{direction.suffix}", None)
        y, *last = LstmSweep.apply(direction, *tensors, _cast(w_hr))  # type: ignore[no-untyped-call]
    elif isinstance(module, (nn.GRU, nn.GRUCell)):
        y, *last = GruSweep.apply(direction, *tensors)  # type: ignore[no-untyped-call]
    elif isinstance(module, (nn.RNN, nn.RNNCell)):
        relu = module.nonlinearity == "relu"
        y, *last = RnnSweep.apply(direction, relu, *tensors)  # type: ignore[no-untyped-call]
    else:
        raise ModelError(
            f"{type(module).__name__} is not a recurrent layer of torch.nn: LSTM, GRU, RNN and their cells"
        )
    if isinstance(module, _KEEP_STATE) and x.device.type == "cpu":
        y, *last = (t.to(initial[0].dtype) for t in (y, *last))
    return y, tuple(last)


def _cast(tensor: Tensor | None) -> Tensor | None:
    """The tensor in autocast's dtype, where that is on."""
    if tensor is None or tensor.dtype == torch.float64 or not torch.is_autocast_enabled(tensor.device.type):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))
