"""A whole training step, or an inference, as one CUDA graph."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import RLock, get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..autograd.tensors.lifetimes import noting
from ..errors import DeviceError, DtypeError, UnsupportedError
from .inputs import Inputs
from .recorder import Recorder
from .state import Holdings, difference, holdings, is_graph, unsteady
from .step_state import Guard, State

#: Runs before the first that is compared or recorded: kernels compile, structures are built.
WARM_UPS = 2
MODES = ("global", "thread_local", "relaxed")
#: One capture at a time in a process.
_lock = RLock()


def capture(
    step: Callable[..., Any],
    *example_inputs: Any,
    state: Iterable[Any] | None = None,
    check: bool = True,
    clone: bool = False,
    pool: tuple[int, int] | None = None,
    capture_error_mode: str = "global",
) -> Callable[..., Any]:
    """Record a training step, its optimizer included, or an inference, as one CUDA graph.

    Each call of the result copies its arguments to where the graph reads them and replays it: one
    launch.  On the CPU the result calls ``step``, and checks arguments and results alike.

    Parameters
    ----------
    step : callable
        Of tensors, or tuples, lists and dicts of such; returns the like, or None.  Model, optimizer
        and graph are those that it closes over.
    *example_inputs : Tensor, or tuple, list or dict of tensors
        Arguments as later calls will have them: shapes, dtypes and devices stay.
    state : iterable, optional
        The modules and optimizers that ``step`` uses.  By default they are found: in its closure,
        its defaults, the globals that its code names, and the object that it is a method of.
    check : bool
        Compare the first replay with ``step`` itself, from the same state and random numbers.
    clone : bool
        Return copies.  By default results are memory of the graph, which the next call overwrites.
    pool : optional
        Memory shared with other captures, ``torch.cuda.graph_pool_handle()``: calls of one then
        overwrite results of the others.
    capture_error_mode : "global", "thread_local" or "relaxed"
        What other threads may do while the graph is made, see ``torch.cuda.graph``.

    Returns
    -------
    callable
        Of the same arguments, by position.  Results are detached: gradients are those that ``step``
        computes itself.

    Raises
    ------
    UnsupportedError
        If ``step`` does what no graph can: waits for the GPU, draws on the CPU, uses an optimizer
        that is not ``capturable``, a ``GradScaler`` or a graph that is new in each call, or counts
        in a module's attribute; if an optimizer is used that was not found; if the first replay
        differs from ``step``.  At a call, if what the graph takes for constant has changed: numbers
        of optimizers (a float ``lr``) and modules (``training``, a dropout's ``p``), which tensor a
        parameter, a buffer or an optimizer's state is, ``requires_grad``, what the variables and
        globals are that ``step`` itself reads, an ``edge_index`` among them.
    DtypeError, ShapeError, DeviceError
        If an argument or a result is no tensor, or not as in ``example_inputs``; the latter also
        if a parameter has moved, or what ``step`` holds is on another device than its inputs.

    Notes
    -----
    Afterwards parameters, buffers, gradients and random numbers are what they were, and an
    optimizer that never stepped has the state from which it starts; this takes a copy of all that
    ``step`` holds while it captures, and four or five runs.  Dropout, samples and
    ``torch.Generator`` objects of the GPU draw anew at each replay.  Gradients stay in ``p.grad``
    as after an eager step, and without ``zero_grad`` add up.  What is Python in ``step`` runs in
    the capture alone: prints, counters, branches.  A call that is refused has copied its arguments
    all the same, which results of the call before may share.  Autocast and grad mode are those of
    the capture.  Graphs that the step reads live as long as the result.  A call holds a lock, and
    waits for the stream of the call before, so threads may share the result with ``clone=True``.
    """
    if not callable(step):
        raise DtypeError(f"step is a {type(step).__name__}: give a function of tensors.")
    if isinstance(step, Step):
        raise UnsupportedError("step is captured already: give the function that it was made of.")
    if capture_error_mode not in MODES:
        raise UnsupportedError(f"capture_error_mode is {capture_error_mode!r}: use one of {MODES}.")
    inputs = Inputs(example_inputs)
    recorder = _recorder(inputs, pool, capture_error_mode)
    if recorder is None:
        return Step(step, inputs)
    values = holdings(step if state is None else None, () if state is None else state)
    device = _device(inputs, values)
    if device.type == "cpu" and recorder.device.type != "cpu":
        return Step(step, inputs)
    recorder.device = device
    if recorder.capturing():
        raise UnsupportedError(
            "a CUDA graph is being captured on this stream: capture before, and call the result "
            "outside of captures."
        )
    with _lock:
        return Captured(step, inputs, State(values, device), recorder, check=check, clone=clone)


def _recorder(inputs: Inputs, pool: tuple[int, int] | None, mode: str) -> Recorder | None:
    """Return a recorder for the current GPU, or None without one."""
    if not torch.cuda.is_available():
        return None
    return Recorder(torch.device("cuda", torch.cuda.current_device()), pool, mode)


def _device(inputs: Inputs, values: Holdings) -> torch.device:
    """Return the device of the inputs, and of what a step holds where that is on a GPU."""
    devices = {t.device: None for t in inputs.examples if t is not None}
    of_modules = (t for m in values.modules for t in (*m.parameters(), *m.buffers()))
    devices |= {t.device: None for t in of_modules}
    devices |= {t.device: None for t in values.tensors if t.is_cuda or not devices}
    if len(devices) > 1:
        raise DeviceError(
            f"inputs, parameters and tensors of step are on {', '.join(map(str, devices))}: move "
            "them to one device, the inputs before the call."
        )
    return next(iter(devices), torch.device("cpu"))


class Step:
    """A step that runs as it is written, as on the CPU."""

    def __init__(self, step: Callable[..., Any], inputs: Inputs) -> None:
        self.step, self.inputs = step, inputs
        self.__wrapped__, self.__doc__ = step, step.__doc__

    def __call__(self, *inputs: Any) -> Any:
        """Run the step."""
        self.inputs.checked(inputs)
        return tree_unflatten(*self.run(inputs))

    def run(self, inputs: tuple[Any, ...]) -> tuple[list[Tensor | None], Any]:
        """Run the step; return its results, detached, and their tree."""
        results, spec = tree_flatten(self.step(*inputs), is_leaf=is_graph)
        for result in results:
            if result is not None and not isinstance(result, Tensor):
                raise DtypeError(
                    f"step returns a {type(result).__name__}, which a replay cannot change: return "
                    "tensors, the loss and not loss.item() for instance."
                )
        return [None if result is None else result.detach() for result in results], spec


class Captured(Step):
    """A step as a CUDA graph, with the memory that it reads and writes."""

    def __init__(
        self,
        step: Callable[..., Any],
        inputs: Inputs,
        state: State,
        recorder: Recorder,
        *,
        check: bool,
        clone: bool,
    ) -> None:
        super().__init__(step, inputs)
        self._recorder, self._clone, self._lock = recorder, clone, RLock()
        with recorder.aside():
            with torch.inference_mode(False), torch.no_grad():
                self._inputs: list[Any] = [
                    t if t is None else t.detach().clone().requires_grad_(t.requires_grad)
                    for t in inputs.examples
                ]
            made = _Making(self, state, self._inputs, recorder).made(check=check)
        self._recorded, self._guard = made, Guard(state, step)
        # The graph has pointers: what it reads stays once the names for it are bound to others.
        self._reached = state.holdings.reached

    def __call__(self, *inputs: Any) -> Any:
        """Replay the step."""
        if self._recorder.capturing():
            raise UnsupportedError(
                "a captured step is called in the capture of a CUDA graph: capture the functions "
                "that it was made of together."
            )
        leaves = self.inputs.checked(inputs)
        with self._lock:
            self._recorder.follow()
            with torch.no_grad():
                for static, leaf in zip(self._inputs, leaves, strict=True):
                    if leaf is not None and leaf is not static:
                        static.copy_(leaf)
            self._guard.check()  # while the GPU copies
            made = self._recorded
            made.replay()
            results = [
                None if result is None else result.clone() if self._clone else result.detach()
                for result in made.results
            ]
        return tree_unflatten(results, made.spec)


class Gradients:
    """The gradients of parameters that a captured graph adds to and leaves."""

    def __init__(self, parameters: list[Tensor], receive: set[int]) -> None:
        """Set the gradient to zeros for parameters that have none and that backward adds to."""
        for parameter in parameters:
            if id(parameter) in receive and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._starts = [(p, p.grad, 0 if p.grad is None else p.grad._version) for p in parameters]
        #: Parameters, and their gradients: what a replay adds to, if to any, and what it leaves.
        self._gradients: list[tuple[Tensor, Tensor | None, Tensor | None]] = []

    def end(self) -> None:
        """Record the gradients that the recorded run has left."""
        for parameter, start, version in self._starts:
            read = start is not None and (parameter.grad is start or start._version != version)
            if read or parameter.grad is not None:
                self._gradients.append((parameter, start if read else None, parameter.grad))
        self._starts = []

    def put(self) -> None:
        """Copy present gradients to the memory that a replay adds to."""
        for parameter, start, _ in self._gradients:
            if start is not None and parameter.grad is not start:
                with torch.no_grad():
                    start.zero_() if parameter.grad is None else start.copy_(parameter.grad)
                parameter.grad = start

    def show(self) -> None:
        """Set ``p.grad`` to the gradients that a replay has left."""
        for parameter, _, end in self._gradients:
            if parameter.grad is not end:
                parameter.grad = end


class Recorded(NamedTuple):
    """A CUDA graph, and what it reads and writes beside its inputs."""

    graph: Any
    results: list[Tensor | None]
    spec: Any  #: where the results are in what the step returns
    gradients: Gradients
    written: list[Tensor]  #: parameters, buffers and the like
    read: list[Any]  #: what graphs and plans had made before, which stays as long as this

    def replay(self) -> None:
        """Replay the graph, and move gradients to where a step leaves them."""
        self.gradients.put()
        self.graph.replay()
        self.gradients.show()
        increment_version(self.written)


class _Making:
    """The making of a CUDA graph of a step: warmed up, observed, recorded and compared."""

    def __init__(
        self, step: Step, state: State, inputs: list[Tensor | None], recorder: Recorder
    ) -> None:
        self._step, self._state, self._inputs, self._recorder = step, state, inputs, recorder
        self._tensors = [tensor for tensor in inputs if tensor is not None]
        self._receive: set[int] = set()
        self._spec: Any = None

    def made(self, *, check: bool) -> Recorded:
        """Record the step, and put back what its runs have changed."""
        done = False
        try:
            self._warm_up()
            expected = self._observed()
            again = self._observed() if check else {}
            self._state.restore()
            made = self._record()
            if check:
                self._compare(made, expected, again)
            done = True
        finally:
            if not done:
                self._state.made = []
            self._state.restore()
        return made

    def _run(self) -> list[Tensor | None]:
        """Run the step on the graph's inputs, without what ran before in autocast's cache."""
        torch.clear_autocast_cache()
        results, self._spec = self._step.run(self._step.inputs.tree(self._inputs))
        torch.clear_autocast_cache()
        return results

    def _warm_up(self) -> None:
        """Run the step WARM_UPS times: kernels compile, and structures are built."""
        state, versions = self._state, [tensor._version for tensor in self._tensors]
        for _ in range(WARM_UPS):
            try:
                with _only(state.holdings.optimizers), self._receiving():
                    results = self._run()
            finally:
                state.note_changes(self._receive)
            for result in results:
                if result is not None and result.device != state.device:
                    raise DeviceError(
                        f"step returns a tensor on {result.device}: return it where it was "
                        f"computed, on {state.device}, and copy it after the call."
                    )
            state.refuse_changes()
            self._step.inputs.refuse_graphs(self._inputs)
            pairs = zip(self._tensors, versions, strict=True)
            for number, (tensor, version) in enumerate(pairs):
                if tensor._version != version or tensor.grad is not None:
                    what = "writes to" if tensor.grad is None else "leaves a gradient at"
                    raise UnsupportedError(
                        f"step {what} tensor {number} of its inputs, which is a copy of yours: "
                        "return the result, torch.autograd.grad(...) for instance."
                    )
            state.restore()

    @contextmanager
    def _receiving(self) -> Iterator[None]:
        """Record the ids of the parameters that backward adds a gradient to."""

        def note(parameter: Tensor) -> None:
            self._receive.add(id(parameter))

        hooks = [
            parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
            for _, parameter in self._state.parameters
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _observed(self) -> dict[str, Tensor]:
        """Run the step from the state as it was, and copy all that it leaves.

        Attributes of modules stay as they are then: a step that reads what it keeps there shows it.
        """
        results = self._run()
        left = self._state.observed() | _results(results)
        self._state.keep_made()
        made, self._state.made = self._state.made, []
        self._state.restore(attributes=False)
        self._state.made = made
        return left

    def _record(self) -> Recorded:
        """Record the graph; tensors stay as they were, and gradients where it has put them."""
        state = self._state
        state.restore()
        with self._recorder.strictly():
            self._run()
        state.restore()
        gradients = Gradients([p for _, p in state.parameters], self._receive)
        with noting() as read:
            graph, results = self._recorder.record(self._run, state.generators()[1:])
        gradients.end()
        made = [optimizer.state.get(p, {}) for optimizer, _, p, _ in state.fresh]
        if [*map(set, made)] != [*map(set, state.made)]:
            raise UnsupportedError(
                "an optimizer makes its state in a later step: take some before."
            )
        state.restore()
        return Recorded(graph, results, self._spec, gradients, state.written(), read)

    def _compare(
        self, made: Recorded, expected: dict[str, Tensor], again: dict[str, Tensor]
    ) -> None:
        """Compare the first replay with the step itself."""
        apart = unsteady(expected, again, self._state.trained)
        if apart:
            raise UnsupportedError(
                f"two runs of step from one state differ: {apart}. It changes something that was "
                "not found and put back: give capture(..., state=(model, optimizer)), or keep it "
                "in a tensor that step names."
            )
        made.replay()
        left = self._state.observed() | _results(made.results)
        apart = difference(left, expected, again)
        if apart:
            raise UnsupportedError(
                f"the first replay is not the step: {apart}. It does what a graph cannot repeat, "
                "such as a branch or a counter in Python; check=False leaves this out."
            )


def _results(results: list[Tensor | None]) -> dict[str, Tensor]:
    """Copy the results of a run, by their names in errors."""
    return {f"result {n}": t.clone() for n, t in enumerate(results) if t is not None}


@contextmanager
def _only(optimizers: list[Any]) -> Iterator[None]:
    """Refuse the steps of other optimizers, whose state would not be put back."""
    thread = get_ident()

    def refuse(optimizer: Optimizer, *_: object) -> None:
        # Backward runs on threads of its own: a hook of a parameter may step there.
        ours = get_ident() == thread or torch._C._current_autograd_node() is not None
        if ours and all(optimizer is not known for known in optimizers):
            raise UnsupportedError(
                f"step uses an optimizer ({type(optimizer).__name__}) that was not found in what "
                "its code names: give capture(..., state=(model, optimizer))."
            )

    hook = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()
