"""The recurrent layers of torch.nn, run such that backward tells what entered and left each of their weights.

Every sweep multiplies the inputs of all times by the input weight at once, and then goes through time with one matrix
product and a few in-place operations a step. Shapes: T times, B examples, H hidden size, P projected size (H without
a projection); x is (T, B, in), y is (T, B, P); what is recorded is (B, T, .).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from anyorder.clipping import torch_private as private
from anyorder.clipping.layer_rules import Books, ParameterView, Tracer
from anyorder.clipping.norms import DirectUse, LinearUse
from anyorder.errors import ModelError

# -- one layer in one direction --------------------------------------------------------------------------------------

Record = Callable[[str, Tensor | None, Tensor], None]
"""Takes a parameter's name, the activations (B, T, in) that it multiplied (None for a bias), and the gradients
(B, T, out) of what came out."""

_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input
_threshold_backward = torch.ops.aten.threshold_backward.grad_input


@dataclass(frozen=True)
class Direction:
    """Which parameters a sweep uses, which way it goes, and whom it tells.

    Attributes:
        suffix: what follows weight_ih, weight_hh, bias_ih, bias_hh, weight_hr in the parameters' names.
        reverse: whether it goes from the last time to the first.
        record: called in backward.
    """

    suffix: str
    reverse: bool
    record: Record

    def steps(self, tensor: Tensor) -> list[Tensor]:
        """Views of the times of a (T, ...) tensor, in the order of the sweep."""
        views = list(tensor.unbind(0))
        return views[::-1] if self.reverse else views

    def tell(
        self, x: Tensor, states: list[Tensor], input_gradients: Tensor, hidden_gradients: Tensor, biased: bool
    ) -> None:
        """Record the maps W_ih x_t + b_ih and W_hh h_(t-1) + b_hh.

        Args:
            x: (T, B, in).
            states: the state before each step, in the order of the sweep.
            input_gradients, hidden_gradients: (B, T, out), of the two maps; one object if they are equal.
            biased: whether there are biases.
        """
        before = torch.stack(states[::-1] if self.reverse else states, dim=1)
        self.record(f"weight_ih{self.suffix}", x.transpose(0, 1), input_gradients)
        self.record(f"weight_hh{self.suffix}", before, hidden_gradients)
        if biased:
            self.record(f"bias_ih{self.suffix}", None, input_gradients)
            self.record(f"bias_hh{self.suffix}", None, hidden_gradients)


def _of_all_inputs(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W x_t + b of all times, (B, T, out) contiguous: what is recorded has the batch first."""
    return F.linear(x.transpose(0, 1).flatten(0, 1), weight, bias).view(x.shape[1], x.shape[0], len(weight))


def _to_input(gradients: Tensor, weight: Tensor) -> Tensor:
    """The gradients (T, B, in) of x, from those (B, T, out) of W x."""
    return (gradients.flatten(0, 1) @ weight).view(*gradients.shape[:2], weight.shape[1]).transpose(0, 1)


def _start(gradient: Tensor | None, like: Tensor) -> Tensor:
    """A buffer for the gradient of the state, which starts at that of the last state."""
    return torch.zeros_like(like) if gradient is None else gradient.clone(memory_format=torch.contiguous_format)


def _backwards(direction: Direction, tensor: Tensor | None, count: int) -> list[Tensor] | list[None]:
    """Views of the times of a (T, ...) tensor against the order of the sweep; of None, as many Nones."""
    return [None] * count if tensor is None else direction.steps(tensor)[::-1]


def _blocks(gates: Tensor, count: int) -> list[Tensor]:
    """The `count` gates of a (B, T, count H) buffer as (T, B, H) views."""
    return list(gates.transpose(0, 1).chunk(count, dim=-1))


class LstmSweep(torch.autograd.Function):
    """LSTM:  i, f, o = sigmoid(.), g = tanh(.) of W_ih x_t + b_ih + W_hh h_(t-1) + b_hh,

        c_t = f c_(t-1) + i g,   h_t = W_hr (o tanh(c_t)) or o tanh(c_t).   [Hochreiter & Schmidhuber 1997; torch]

    From x, h_0 (B, P), c_0 (B, H): y, h_T, c_T.
    """

    @staticmethod
    def forward(
        ctx: Any,
        direction: Direction,
        x: Tensor,
        h0: Tensor,
        c0: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
        w_hr: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        bias = None if b_ih is None or b_hh is None else b_ih + b_hh
        gates = _of_all_inputs(x, w_ih, bias)
        c, tanh_c, m = (x.new_empty(*x.shape[:2], c0.shape[1]) for _ in range(3))
        y = m if w_hr is None else x.new_empty(*x.shape[:2], h0.shape[1])
        i, f, g, o = _blocks(gates, 4)
        i_f = gates.transpose(0, 1)[..., : 2 * c0.shape[1]]
        h_before, c_before = h0, c0
        views = [direction.steps(buffer) for buffer in (gates.transpose(0, 1), i_f, i, f, g, o, c, tanh_c, m, y)]
        for gates_t, i_f_t, i_t, f_t, g_t, o_t, c_t, tanh_t, m_t, y_t in zip(*views, strict=True):
            gates_t.addmm_(h_before, w_hh.t())
            i_f_t.sigmoid_()
            g_t.tanh_()
            o_t.sigmoid_()
            torch.mul(f_t, c_before, out=c_t).addcmul_(i_t, g_t)
            torch.mul(o_t, torch.tanh(c_t, out=tanh_t), out=m_t)
            if w_hr is not None:
                y_t.copy_(F.linear(m_t, w_hr))
            h_before, c_before = y_t, c_t
        ctx.direction = direction
        ctx.biased = bias is not None
        ctx.save_for_backward(x, h0, c0, w_ih, w_hh, w_hr, gates, c, tanh_c, None if w_hr is None else m, y)
        ctx.set_materialize_grads(False)
        return y, h_before.clone(), c_before.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dh_n: Tensor | None, dc_n: Tensor | None) -> tuple[Any, ...]:
        x, h0, c0, w_ih, w_hh, w_hr, gates, c, tanh_c, m, y = ctx.saved_tensors
        direction: Direction = ctx.direction
        dh, dc = _start(dh_n, h0), _start(dc_n, c0)
        projected = None if w_hr is None else torch.empty_like(y)
        scratch = gates.new_empty(len(c0), gates.shape[2])
        d_i, d_f, d_g, d_o = scratch.chunk(4, dim=1)
        d_i_f, size = scratch[:, : 2 * c0.shape[1]], c0.shape[1]
        states, cells = [h0, *direction.steps(y)[:-1]], [c0, *direction.steps(c)[:-1]]
        i, f, g, o = _blocks(gates, 4)
        i_f = gates.transpose(0, 1)[..., : 2 * size]
        buffers = (gates.transpose(0, 1), i_f, i, f, g, o, tanh_c, dy, projected)
        views = [_backwards(direction, buffer, len(y)) for buffer in buffers]
        # The gates' gradients take the place of the gates: a second backward is refused by torch.
        for gates_t, i_f_t, i_t, f_t, g_t, o_t, tanh_t, dy_t, out_t, c_before in zip(*views, cells[::-1], strict=True):
            if dy_t is not None:
                dh += dy_t
            dm = dh if w_hr is None else out_t.copy_(dh) @ w_hr
            torch.mul(dm, tanh_t, out=d_o)
            dm *= o_t
            dc += _tanh_backward(dm, tanh_t, grad_input=dm)
            torch.mul(dc, g_t, out=d_i)
            torch.mul(dc, c_before, out=d_f)
            torch.mul(dc, i_t, out=d_g)
            dc *= f_t
            _sigmoid_backward(d_i_f, i_f_t, grad_input=i_f_t)
            _tanh_backward(d_g, g_t, grad_input=g_t)
            _sigmoid_backward(d_o, o_t, grad_input=o_t)
            if c_before is not c0 or ctx.needs_input_grad[2]:
                dh = gates_t @ w_hh
        direction.tell(x, states, gates, gates, ctx.biased)
        if projected is not None:
            direction.record(f"weight_hr{direction.suffix}", m.transpose(0, 1), projected.transpose(0, 1))
        dx = _to_input(gates, w_ih) if ctx.needs_input_grad[1] else None
        return None, dx, dh, dc, None, None, None, None, None


class GruSweep(torch.autograd.Function):
    """GRU:  r, z = sigmoid of their parts of W_ih x_t + b_ih + W_hh h_(t-1) + b_hh,

        n = tanh(W_in x_t + b_in + r (W_hn h_(t-1) + b_hn)),   h_t = (1 - z) n + z h_(t-1).   [Cho et al. 2014; torch]

    The reset gate multiplies W_hn h + b_hn: the gradients of the two maps differ in n by the factor r. From x, h_0: y,
    h_T.
    """

    @staticmethod
    def forward(
        ctx: Any,
        direction: Direction,
        x: Tensor,
        h0: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        size = h0.shape[1]
        gates = _of_all_inputs(x, w_ih, b_ih)
        hidden_n, y = (x.new_empty(*x.shape[:2], size) for _ in range(2))
        r, z, n = _blocks(gates, 3)
        r_z = gates.transpose(0, 1)[..., : 2 * size]
        before = h0
        for r_z_t, r_t, z_t, n_t, hidden_n_t, y_t in zip(
            *map(direction.steps, (r_z, r, z, n, hidden_n, y)), strict=True
        ):
            hidden = F.linear(before, w_hh, b_hh)
            hidden_n_t.copy_(hidden[:, 2 * size :])
            r_z_t.add_(hidden[:, : 2 * size]).sigmoid_()
            n_t.addcmul_(r_t, hidden_n_t).tanh_()
            before = torch.lerp(n_t, before, z_t, out=y_t)
        ctx.direction = direction
        ctx.biased = b_ih is not None
        ctx.save_for_backward(x, h0, w_ih, w_hh, gates, hidden_n, y)
        ctx.set_materialize_grads(False)
        return y, before.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dh_n: Tensor | None) -> tuple[Any, ...]:
        x, h0, w_ih, w_hh, gates, hidden_n, y = ctx.saved_tensors
        direction: Direction = ctx.direction
        size = h0.shape[1]
        dh, kept = _start(dh_n, h0), torch.empty_like(h0)
        scratch = gates.new_empty(len(h0), gates.shape[2])
        d_r, d_z, d_n = scratch.chunk(3, dim=1)
        d_r_z = scratch[:, : 2 * size]
        states = [h0, *direction.steps(y)[:-1]]
        r, z, n = _blocks(gates, 3)
        r_z = gates.transpose(0, 1)[..., : 2 * size]
        hidden = torch.empty_like(gates)
        buffers = (r_z, r, z, n, hidden_n, hidden.transpose(0, 1), dy)
        views = [_backwards(direction, buffer, len(y)) for buffer in buffers]
        # The gates' gradients take the place of the gates: a second backward is refused by torch.
        for r_z_t, r_t, z_t, n_t, hidden_n_t, hidden_t, dy_t, before in zip(*views, states[::-1], strict=True):
            if dy_t is not None:
                dh += dy_t
            torch.sub(before, n_t, out=d_z).mul_(dh)
            torch.mul(dh, z_t, out=kept)
            torch.sub(dh, kept, out=d_n)
            _tanh_backward(d_n, n_t, grad_input=n_t)
            torch.mul(n_t, hidden_n_t, out=d_r)
            torch.mul(n_t, r_t, out=hidden_t[:, 2 * size :])
            _sigmoid_backward(d_r_z, r_z_t, grad_input=r_z_t)
            hidden_t[:, : 2 * size] = r_z_t
            if before is not h0 or ctx.needs_input_grad[2]:
                dh = (hidden_t @ w_hh).add_(kept)
        direction.tell(x, states, gates, hidden, ctx.biased)
        dx = _to_input(gates, w_ih) if ctx.needs_input_grad[1] else None
        return None, dx, dh, None, None, None, None


class RnnSweep(torch.autograd.Function):
    """Elman's:  h_t = tanh or relu of W_ih x_t + b_ih + W_hh h_(t-1) + b_hh.   [Elman 1990]  From x, h_0: y, h_T."""

    @staticmethod
    def forward(
        ctx: Any,
        direction: Direction,
        relu: bool,
        x: Tensor,
        h0: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        bias = None if b_ih is None or b_hh is None else b_ih + b_hh
        sums = _of_all_inputs(x, w_ih, bias).transpose(0, 1)
        y = torch.empty_like(sums, memory_format=torch.contiguous_format)
        before = h0
        for sums_t, y_t in zip(direction.steps(sums), direction.steps(y), strict=True):
            sums_t.addmm_(before, w_hh.t())
            before = torch.clamp(sums_t, min=0, out=y_t) if relu else torch.tanh(sums_t, out=y_t)
        ctx.direction = direction
        ctx.biased = bias is not None
        ctx.relu = relu
        ctx.save_for_backward(x, h0, w_ih, w_hh, y)
        ctx.set_materialize_grads(False)
        return y, before.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dh_n: Tensor | None) -> tuple[Any, ...]:
        x, h0, w_ih, w_hh, y = ctx.saved_tensors
        direction: Direction = ctx.direction
        dh = _start(dh_n, h0)
        gradients = y.new_empty(y.shape[1], y.shape[0], y.shape[2])
        states = [h0, *direction.steps(y)[:-1]]
        views = [_backwards(direction, buffer, len(y)) for buffer in (gradients.transpose(0, 1), y, dy)]
        for gradients_t, y_t, dy_t, before in zip(*views, states[::-1], strict=True):
            if dy_t is not None:
                dh += dy_t
            if ctx.relu:
                _threshold_backward(dh, y_t, 0, grad_input=gradients_t)
            else:
                _tanh_backward(dh, y_t, grad_input=gradients_t)
            if before is not h0 or ctx.needs_input_grad[3]:
                dh = gradients_t @ w_hh
        direction.tell(x, states, gradients, gradients, ctx.biased)
        dx = _to_input(gradients, w_ih) if ctx.needs_input_grad[2] else None
        return None, None, dx, dh, None, None, None, None


# -- a layer on a batch ----------------------------------------------------------------------------------------------

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


# -- inside a traced module ------------------------------------------------------------------------------------------

RecurrentLayer = nn.RNNBase | nn.RNNCellBase
_LAYERS = (nn.RNNBase, nn.RNNCellBase)


@contextmanager
def recurrent_layers(modules: Sequence[nn.Module], tracer: Tracer) -> Iterator[list[nn.Module]]:
    """Run the recurrent layers of torch.nn among the modules, those of plain parameters, on the whole batch.

    Yields: these layers.
    """
    layers: list[nn.Module] = []
    with ExitStack() as stack:
        for layer in modules:
            if not isinstance(layer, _LAYERS) or "forward" in vars(layer):
                continue
            if {name for name, _ in layer.named_parameters(recurse=False)} >= set(_weight_names(layer)):
                layer.forward = functools.partial(_forward, tracer, layer)
                stack.callback(delattr, layer, "forward")
                layers.append(layer)
        yield layers


def _weight_names(layer: RecurrentLayer) -> list[str]:
    if isinstance(layer, nn.RNNBase):
        return [name for names in layer._all_weights for name in names]
    return ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if layer.bias else [])]


def _forward(tracer: Tracer, layer: RecurrentLayer, input: Any, hx: Any = None) -> Any:
    """What `layer(input, hx)` returns for one example; a layer takes a batch, here n = 1 as a rule, or one sequence."""
    if not isinstance(input, Tensor) or tracer.nested():
        return type(layer).forward(layer, input, hx)
    cell, lstm = isinstance(layer, nn.RNNCellBase), isinstance(layer, (nn.LSTM, nn.LSTMCell))
    dim = (
        0 if cell or layer.batch_first else 1
    )  # of n in the inputs and outputs; states have it in front or behind layers
    state_dim = 0 if cell else 1
    states = [] if hx is None else list(hx) if isinstance(hx, (tuple, list)) else [hx]
    alone = input.dim() == (1 if cell else 2)
    if alone:
        input, states = input.unsqueeze(dim), [state.unsqueeze(state_dim) for state in states]
    parts = {name: tracer.part(getattr(layer, name)) for name in _weight_names(layer)}

    def recurrent(books: Books, x: Tensor, *hidden: Tensor) -> tuple[Tensor, ...]:
        books.expect(*parts.values())
        folded = tuple(_fold(h, state_dim) for h in hidden)
        hx = None if not folded else folded if lstm else folded[0]
        twin = _with_own_weights(books, layer, parts)
        result = run_recurrent(twin, _fold(x, dim), hx, _recorder(books, parts, len(x)))
        y, last = (None, result) if cell else result
        last = last if lstm else (last,)
        outputs = () if y is None else (_unfold(y, dim, len(x)),)
        return *outputs, *(_unfold(h, state_dim, len(x)) for h in last)

    with private.WithoutModes():
        outputs = list(tracer.on_batch(recurrent, input, *states))
    tracer.note(*outputs)
    y = None if cell else outputs.pop(0)
    if alone:
        y, outputs = y if y is None else y.squeeze(dim), [state.squeeze(state_dim) for state in outputs]
    last = tuple(outputs) if lstm else outputs[0]
    return last if cell else (y, last)


def _fold(tensor: Tensor, dim: int) -> Tensor:
    """(B, ..., n, ...) with B and n in one dimension, at `dim`."""
    return tensor.movedim(0, dim).flatten(dim, dim + 1)


def _unfold(tensor: Tensor, dim: int, batch: int) -> Tensor:
    """(B, ..., n, ...) again."""
    return tensor.reshape(*tensor.shape[:dim], batch, -1, *tensor.shape[dim + 1 :]).movedim(dim, 0)


def _with_own_weights(books: Books, layer: RecurrentLayer, parts: dict[str, ParameterView | None]) -> Any:
    """The layer with the parameters themselves in the place of their copies."""
    twin: Any = object.__new__(type(layer))  # `copy.copy` would renew what the layer keeps of its weights
    vars(twin).update(vars(layer))
    twin._parameters = {
        name: getattr(layer, name) if part is None else books.anchored(_Same, books.tensor(part))
        for name, part in parts.items()
    }
    return twin


def _recorder(books: Books, parts: dict[str, ParameterView | None], batch: int) -> Any:
    def record(name: str, activations: Tensor | None, gradients: Tensor) -> None:
        part = parts[name]
        if part is None:
            return
        g = gradients.reshape(batch, -1, gradients.shape[-1])
        dtype = books.dtypes[part.name]
        if activations is None:
            books.enter(part, DirectUse(g.sum(1, dtype=dtype), dtype))
        else:
            a = activations.reshape(batch, -1, activations.shape[-1])
            books.enter(part, LinearUse(a, g, dtype))

    return record


class _Same(torch.autograd.Function):
    """A parameter, such that what is computed from it depends on the anchor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, parameter: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None, None
