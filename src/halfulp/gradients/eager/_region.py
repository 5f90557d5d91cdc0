"""Region: the forward pass of a model, in which every gradient-carrying tensor gets a site."""

from __future__ import annotations

import bisect
import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, _SingleLevelFunction
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint

from ...kernels import disable_tracing
from .._functions import (
    classify_function,
    get_function_name,
    is_parameter,
    list_differentiable,
    list_second_factors,
    map_tensors,
    memoize_by_tensor,
)
from .._site import CopyWithStrides, Site, copy_with_strides, find_narrow_format
from ._backward import (
    FIRST_LEAF_NUMBER,
    Backward,
    FloatWideningView,
    GradientHook,
    get_region,
    is_at_global_exponent,
    mark_node_sites,
    refuse_float16_gradient,
    set_region,
)

COMPILED_PART_TEXT = (
    "a part of the model is compiled by itself, and exponents cannot be put into its backward pass: compile the whole "
    'model with torch.compile(model, backend=scaler.backend("inductor")), or do not compile the part'
)
# Sets and returns what is not None while something that torch.compile was given runs. The function that only returns it
# gives up a reference to it each time in torch 2.6, until Python crashes.
_set_dynamo_callback = torch._C._dynamo.eval_frame.set_eval_frame


def is_compiler_active() -> bool:
    """Return whether something that torch.compile was given runs."""
    callback = _set_dynamo_callback(None)
    if callback is not None:
        _set_dynamo_callback(callback)
    return callback is not None


def refuse_compiled_part() -> None:
    """Refuse a part of the model that is compiled by itself."""
    if torch.compiler.is_dynamo_compiling() or is_compiler_active():
        raise NotImplementedError(COMPILED_PART_TEXT)


def disable_torch_function(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a region's method so that the torch functions it calls are not watched."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return run


class ParameterNames:
    """A cached map from parameters to the modules that hold them, looked up again for an unknown parameter."""

    def __init__(self, model: nn.Module, prefix: str) -> None:
        self._model = weakref.ref(model)
        self._prefix = f"{prefix}." if prefix else ""
        self._names: dict[int, str | None] = {}

    def find_module_name(self, parameter: Tensor) -> str | None:
        """Return the qualified name of the module that holds a parameter; None where the model does not list it."""
        if id(parameter) not in self._names:
            model = self._model()
            listed = () if model is None else model.named_parameters()
            self._names |= {id(p): (self._prefix + name).rpartition(".")[0] or "model" for name, p in listed}
            self._names.setdefault(id(parameter), None)
        return self._names[id(parameter)]

    def list_parts_by_id(self) -> dict[int, str]:
        """Return the qualified names of the modules that have children, by their ids."""
        model = self._model()
        modules = () if model is None else model.named_modules()
        parts = ((name, one) for name, one in modules if next(one.children(), None) is not None)
        return {id(one): (self._prefix + name).strip(".") for name, one in parts}

    def is_sharded(self) -> bool:
        """Return whether parts of the model belong to FSDP, which computes with copies of its parameters."""
        from torch.distributed.fsdp import FSDPModule

        model = self._model()
        return model is not None and any(isinstance(module, FSDPModule) for module in model.modules())


class CallRecording:
    """A record of a forward pass in a region: which call made each node, at which site, and which nodes are edges.

    Attributes:
        failed: Whether the forward pass had something that only a region can handle.
        numbers: 0-d results, which the model may keep besides its outputs (see `_replay.learn_graph`).
    """

    def __init__(self) -> None:
        self.failed = False
        self.opened: dict[Site, None] = {}
        self.edges: set[Any] = set()
        self._begins: list[int] = []
        self._calls: list[tuple[int, Site]] = []
        self.numbers: list[weakref.ref] = []

    def add_call(self, begun: int, site: Site) -> None:
        """Note that the nodes that were made since a sequence number are at a site."""
        end = torch._C._autograd._get_sequence_nr()
        if end > begun:
            self._begins.append(begun)
            self._calls.append((end, site))

    def find_site(self, node: Any) -> Site | None:
        """Return the site of the call that made a node; None where none did."""
        number = node._sequence_nr()
        call = bisect.bisect_right(self._begins, number) - 1
        if call < 0:
            return None
        end, site = self._calls[call]
        return site if number < end else None


# Which of the gradients that a node passes on, and the hook that moves it.
SlotHooks = tuple[tuple[int, GradientHook], ...]


class ArgumentGradientMoves:
    """Moves the gradients of a call's arguments that belong to other sites, by hooks of the nodes that read them.

    Autograd runs nodes in the reverse of the order in which they were made, and adds up what they send to a tensor in
    that order. A node in between, such as a view's, would send what several nodes of one call make later, and as one
    sum: another number in the last bit where others read the tensor too. Hooks leave the graph as it is.

    A view is needed for a leaf under autocast, which would otherwise be cast once for calls at several sites, for a
    float16 parameter, whose gradient leaves in float32, and where gradients are rounded to a format: what a call passes
    on for an argument is rounded once, whichever of its nodes made it.
    """

    def __init__(self, backward: Backward, site: Site) -> None:
        self._backward = backward
        self._site = site
        self.hooks: dict[tuple[Any, int], GradientHook] = {}
        # Leaves by identity, as their nodes may not be there before they are read; None: a parameter, whose gradient
        # leaves for the global exponent.
        self.leaves: dict[int, GradientHook | None] = {}
        # Of parameters.
        self.views: list[Tensor] = []
        self._begun = 0

    def can_move_by_hook(self, tensor: Tensor) -> bool:
        """Return whether a hook can move a tensor's gradient; else it needs a view."""
        if self._backward.format is not None:
            return False
        return not tensor.is_leaf or not (tensor.dtype == torch.float16 or torch._C._is_any_autocast_enabled())

    def add_tensor(self, tensor: Tensor, source: Site) -> None:
        """Note that the call reads a tensor of another site."""
        hook = self._backward.get_edge_hook(source, self._site)
        if tensor.is_leaf:
            self.leaves[id(tensor)] = hook
        else:
            self.hooks[tensor.grad_fn, tensor.output_nr] = hook

    def run_call(
        self, recording: CallRecording | None, function: Callable, args: tuple, kwargs: dict, written: Tensor | None
    ) -> Any:
        """Call a function, and hook the nodes that read tensors of other sites; ``written``: what it writes into."""
        self._begun = torch._C._autograd._get_sequence_nr()
        out = function(*args, **kwargs)
        if recording is not None:
            recording.add_call(self._begun, self._site)
        if written is None:
            self._hook_readers(out, out)
        else:
            self._hook_readers([written, written._base], written)
        return out

    def _hook_readers(self, made: Any, out: Any) -> None:
        if not (self.hooks or self.leaves or self.views):
            return
        if isinstance(out, list | tuple):
            out = next((x for x in out if isinstance(x, Tensor)), None)
        leaving = self._backward.get_weight_edge_hook(
            self._site, out.dtype if isinstance(out, Tensor) else torch.float32
        )
        global_site = self._backward.sites.global_site
        for view in self.views:
            node: Any = view.grad_fn
            if isinstance(node, FloatWideningView._backward_cls):
                node.hook = leaving
            else:
                node.register_prehook(leaving)
            mark_node_sites(node, self._site, global_site, global_site)
        if self.hooks or self.leaves:
            for node, moves in self._list_readers(made, leaving):
                node.register_hook(_make_slot_hook(self._backward, moves))
                # It is at the call's site; what it passes on may be at several.
                mark_node_sites(node, self._site, self._site, global_site)

    def _list_readers(self, made: Any, leaving: GradientHook) -> Iterator[tuple[Any, SlotHooks]]:
        """Yield the nodes of the call that read noted tensors, each with its hooks."""
        pending: list[Any] = [x.grad_fn for x in list_differentiable(made)]
        seen = {None}
        while pending:
            node = pending.pop()
            if node in seen or not self._begun <= node._sequence_nr() < FIRST_LEAF_NUMBER:
                continue
            seen.add(node)
            moves = []
            for slot, link in enumerate(node.next_functions):
                hook = self.hooks.get(link) or self._find_leaf_hook(link[0], leaving)
                if hook is None:
                    pending.append(link[0])
                else:
                    moves.append((slot, hook))
            if moves:
                yield node, tuple(moves)

    def _find_leaf_hook(self, node: Any, leaving: GradientHook) -> GradientHook | None:
        if not self.leaves or node is None or node._sequence_nr() < FIRST_LEAF_NUMBER:
            return None
        leaf = id(node.variable)
        return (self.leaves[leaf] or leaving) if leaf in self.leaves else None


def _make_slot_hook(backward: Backward, moves: SlotHooks) -> Callable:
    """Return a hook that moves some of the gradients that a node passes on."""
    if moves not in backward.reader_hooks:

        @disable_tracing
        def move_gradients(gradients: tuple, given: tuple) -> tuple | None:
            if not backward.active:
                # Whether that is for a second derivative's sake.
                backward.has_closed_edges()
                return None
            found: list[Tensor | None] | None = None
            for slot, hook in moves:
                changed = hook((gradients[slot],))
                if changed is not None:
                    found = list(gradients) if found is None else found
                    found[slot] = changed[0]
            return None if found is None else tuple(found)

        backward.reader_hooks[moves] = move_gradients
    return backward.reader_hooks[moves]


_SITE_ATTRIBUTE = "_halfulp_site"


class Region(TorchFunctionMode):
    """Watches every torch function of a forward pass, above autograd.

    The gradient of each tensor belongs to a site. A product opens one; any other function needs all its inputs at one
    site, the latest, and gives its results to it: gradients are linear in what arrives, so no function needs a rule.
    Where an input belongs elsewhere, hooks of the nodes that read it move its gradient back (`ArgumentGradientMoves`).
    """

    is_replaying = False

    def __init__(self, backward: Backward, names: ParameterNames) -> None:
        super().__init__()
        self.path: list[str] = []
        self._backward = backward
        self._global_site = backward.sites.global_site
        self._names = names
        self._calls: Counter[str] = Counter()
        # What later forward passes know of this one; None where they need not.
        self.recording: CallRecording | None = None
        self._rank: dict[Site, int] = {}

    def __enter__(self) -> Region:
        self._outer = get_region()
        self._backward.close_edges_after_backward()
        self.begun = torch._C._autograd._get_sequence_nr()
        super().__enter__()
        set_region(self)
        _watch_custom_functions(1)
        return self

    def __exit__(self, *error: object) -> None:
        _watch_custom_functions(-1)
        set_region(self._outer)
        self._backward.forwards += 1
        super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        refuse_compiled_part()
        if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return function(*args, **kwargs)
        differentiable = list(list_differentiable((args, kwargs)))
        if not differentiable:
            return function(*args, **kwargs)
        kind = classify_function(function)
        if kind == "shape":
            # Only the first argument has a gradient.
            differentiable = list(list_differentiable(args[:1]))
        if kind == "fact" or not differentiable:
            return function(*args, **kwargs)
        if kind == "property":
            return self._read_property(function, args, differentiable)
        if kind == "in-place":
            return self._run_in_place(function, args, kwargs, differentiable)
        return self._run_at_site(
            function, args, kwargs, self._find_call_site(kind, function, args, differentiable), kind
        )

    def _run_at_site(self, function: Callable, args: tuple, kwargs: dict, site: Site, kind: str) -> Any:
        """Run a function with all its gradients at one site."""
        reads = ArgumentGradientMoves(self._backward, site)
        # Views run in the reverse of the order they are made in, and arms of a join must add up in the plain order.
        taken = 1 if kind == "shape" else len(args)
        kwargs = kwargs if kind == "shape" else self._move_arguments(kwargs, site, reads, function)
        given = (*self._move_arguments(args[:taken], site, reads, function), *args[taken:])
        out = reads.run_call(self.recording, function, given, kwargs, None)
        made = self._set_result_sites(out, site, kind, reads)
        watches = kind == "product" and self._backward.measuring and self._backward.policy.wants_operands
        if watches and isinstance(out, Tensor) and not out.is_leaf:
            node: Any = out.grad_fn
            for factor in list_second_factors(function, args, kwargs):
                node.register_prehook(self._backward.make_operand_hook(site, factor))
        return made

    def _fail_recording(self) -> None:
        if self.recording is not None:
            self.recording.failed = True

    def _read_property(self, function: Callable, args: tuple, differentiable: list[Tensor]) -> Any:
        """Read a property of a tensor; some, such as ``x.mT``, carry the tensor's gradient."""
        out = function(*args)
        if not isinstance(out, Tensor) or not out.requires_grad or out.is_leaf:
            return out
        return self._run_at_site(function, args, {}, self._find_common_site(function, differentiable), "plain")

    @disable_torch_function
    def take_arguments(self, arguments: Any) -> None:
        """Put the model's arguments at the global exponent, whichever thread made them."""
        for x in list_differentiable(arguments):
            if self._read_site(x) is None:
                self._backward.mark_outer_node(x.grad_fn)

    # sites ----------------------------------------------------------------------------------------------------

    def find_site(self, tensor: Tensor) -> Site:
        """Return the site of a tensor's gradient; tensors made before the region are at the global one."""
        site = self._read_site(tensor)
        if site is None and tensor._base is not None:
            site = self._read_site(tensor._base)
        if site is None:
            self._refuse_unwatched(tensor)
            return self._global_site
        return site

    def _read_site(self, tensor: Tensor) -> Site | None:
        """Return the site that a region of this scaler gave a tensor."""
        site = getattr(tensor, _SITE_ATTRIBUTE, None)
        return site if site is None or site is self._global_site or site.global_site is self._global_site else None

    def _refuse_unwatched(self, tensor: Tensor) -> None:
        """Refuse a tensor that an unwatched function made in this region, as its gradient's exponent is unknown."""
        node = tensor.grad_fn
        if self._backward.second_order:
            # Made by a derivative within the model: all gradients have the global exponent until the next update.
            return
        if (
            node is not None
            and self.begun <= node._sequence_nr() < FIRST_LEAF_NUMBER
            and not is_at_global_exponent(node, self._global_site)
        ):
            raise NotImplementedError(
                f"a tensor of shape {list(tensor.shape)} was made inside {'.'.join(self.path) or 'the model'} by "
                f"{node.name()}, which is no torch function that can be watched (an extension, or a transform of "
                "torch.func): call it inside a torch.autograd.Function, or take policy='dynamic'"
            )
        self._backward.mark_outer_node(node)

    def _find_call_site(self, kind: str, function: Callable, args: tuple, differentiable: list[Tensor]) -> Site:
        """Return the site of the gradients of a function's inputs and results; of a cell that of its state, if any."""
        if kind == "cell":
            state = next(list_differentiable(args[1]), None) if len(args) > 1 else None
            site = self._global_site if state is None or is_parameter(state) else self.find_site(state)
            return self._open_site(function, differentiable) if site is self._global_site else site
        return (self._open_site if kind == "product" else self._find_common_site)(function, differentiable)

    def _open_site(self, function: Callable, differentiable: list[Tensor]) -> Site:
        """Return the site of this call of a product."""
        parameter = next((x for x in differentiable if is_parameter(x)), None)
        module = None if parameter is None else self._names.find_module_name(parameter)
        key = module or ".".join([*self.path[-1:], get_function_name(function)])
        call = self._calls[key]
        self._calls[key] = call + 1
        site = self._backward.sites.open_site(f"{key}#{call}" if call else key)
        self._rank[site] = len(self._rank)
        if self.recording is not None:
            self.recording.opened.setdefault(site)
        self._backward.reached.setdefault(site)
        return site

    def _find_common_site(self, function: Callable, differentiable: list[Tensor]) -> Site:
        """Return the latest site of a function's inputs; a new site if it reads only parameters."""
        sites = [self.find_site(x) for x in differentiable if not is_parameter(x)]
        if not sites:
            return self._open_site(function, differentiable)
        return sites[0] if len(sites) == 1 else max(sites, key=lambda site: self._rank.get(site, -1))

    # edges ----------------------------------------------------------------------------------------------------

    def _move_arguments(
        self, value: Any, site: Site, reads: ArgumentGradientMoves | None, function: Callable | None = None
    ) -> Any:
        """Return arguments whose gradients all leave ``site``, or are noted in ``reads`` and will.

        A composite function may ask whether two arguments are one tensor, so that they must stay one.
        """

        def move_tensor(x: Tensor) -> Tensor:
            if is_parameter(x):
                return self._read_parameter(x, site, reads, function)
            source = self.find_site(x)
            if reads is None or source is site or not reads.can_move_by_hook(x):
                return self.add_edge(x, source, site)
            reads.add_tensor(x, source)
            return x

        return map_tensors(value, memoize_by_tensor(move_tensor) if isinstance(function, FunctionType) else move_tensor)

    def _read_parameter(
        self, parameter: Tensor, site: Site, reads: ArgumentGradientMoves | None, function: Callable | None
    ) -> Tensor:
        """Return a parameter for a reader at ``site``: itself, or a view whose gradient leaves the site."""
        refuse_float16_gradient(parameter, self._names.is_sharded)
        known = self._names.find_module_name(parameter) is not None and type(parameter) is nn.Parameter
        if not known or parameter.dtype == torch.float16:
            self._fail_recording()
        if site is self._global_site or reads is None:
            return parameter
        if reads.can_move_by_hook(parameter):
            reads.leaves[id(parameter)] = None
            return parameter
        if parameter.dtype == torch.float16:
            view = FloatWideningView.apply(parameter)
        elif function is not None and get_function_name(function).startswith("embedding"):
            view = torch.ops.aten.alias.default(parameter)  # which takes sparse gradients
        else:
            view = parameter.view_as(parameter)
        reads.views.append(view)
        if self.recording is not None:
            self.recording.edges.add(view.grad_fn)
        return view

    def add_edge(self, tensor: Tensor, source: Site, target: Site, leaving: bool = False) -> Tensor:
        """Return a view or copy for a reader at ``target``; ``leaving``: a reader that may write into it.

        A write into a view would go round the hook.
        """
        if source is target:
            return tensor
        viewed = tensor.layout is torch.strided and not leaving
        out = tensor.view_as(tensor) if viewed else copy_with_strides(tensor)
        node: Any = out.grad_fn
        node.register_prehook(self._backward.get_edge_hook(source, target))
        if self.recording is not None:
            self.recording.edges.add(node)
        mark_node_sites(node, target, source, self._global_site)
        setattr(out, _SITE_ATTRIBUTE, target)
        return out

    # results --------------------------------------------------------------------------------------------------

    def _run_in_place(self, function: Callable, args: tuple, kwargs: dict, differentiable: list[Tensor]) -> Any:
        """Run a function that writes into its first argument, whose site does not change."""
        if args and isinstance(args[0], list | tuple):
            name = get_function_name(function)
            raise NotImplementedError(
                f"{name} in {'.'.join(self.path) or 'the model'} writes into several tensors whose gradients may have "
                f"exponents of their own: write into each, or take {name.rstrip('_')}"
            )
        written = args[0] if args and isinstance(args[0], Tensor) else differentiable[0]
        site = self.find_site(written) if written.requires_grad else self._find_common_site(function, differentiable)
        reads = ArgumentGradientMoves(self._backward, site)
        kwargs = self._move_arguments(kwargs, site, reads)
        given = (written, *self._move_arguments(args[1:], site, reads)) if args else ()
        out = reads.run_call(self.recording, function, given, kwargs, written)
        for x in (written, written._base):
            if x is not None and x.requires_grad and not x.is_leaf:
                self._set_site(x, getattr(x, _SITE_ATTRIBUTE, site))
        return out

    def _set_result_sites(self, out: Any, site: Site, kind: str, reads: ArgumentGradientMoves | None = None) -> Any:
        """Assign the new tensors of a function's results to ``site``, and return the results."""
        nodes: set = set()
        return map_tensors(out, lambda x: self._set_result_site(x, site, kind, nodes, reads))

    def _set_result_site(
        self, out: Tensor, site: Site, kind: str, nodes: set, reads: ArgumentGradientMoves | None
    ) -> Tensor:
        if out.is_leaf or (reads is not None and reads.hooks and (out.grad_fn, out.output_nr) in reads.hooks):
            # One of the arguments that were read stays at its site.
            return out
        if kind == "product":
            site.stored = find_narrow_format(out.dtype)
        if kind == "cell" and self._backward.format is not None:
            # A cell reads its own results, too, as it does the new state: a copy's gradient is what others send.
            out = copy_with_strides(out)
        if kind in ("product", "cell") and self._backward.format is not None and out.grad_fn not in nodes:
            node: Any = out.grad_fn
            nodes.add(node)
            node.register_prehook(self._backward.round_gradients)
        if out.dim() == 0 and site is not self._global_site and not out._is_view():
            # Numbers are losses: they may leave the model by other ways than its output.
            out = self.add_edge(out, site, self._global_site, leaving=True)
            site = self._global_site
            if self.recording is not None:
                self.recording.numbers.append(weakref.ref(out))
        return self._set_site(out, site)

    def _set_site(self, out: Tensor, site: Site) -> Tensor:
        """Set a tensor's site; at the global exponent, mark its node as an exit."""
        setattr(out, _SITE_ATTRIBUTE, site)
        if site is self._global_site:
            mark_node_sites(out.grad_fn, site, site, site)
        return out

    @disable_torch_function
    def call_at_global_exponent(self, call: Callable[[tuple], Any], args: tuple) -> Any:
        """Call a function with its incoming and outgoing gradients at the global exponent; return its results."""
        self._fail_recording()
        moved = self._move_arguments(args, self._global_site, None)
        versions = [x._version for x in list_differentiable(moved)]
        out = call(moved)
        if versions != [x._version for x in list_differentiable(moved)]:
            raise NotImplementedError(
                f"a custom Function in {'.'.join(self.path[-1:]) or 'the model'} writes into its argument, whose "
                "gradient then goes round the exponents: let it work on a clone"
            )
        return self._set_result_sites(out, self._global_site, "plain")

    @disable_torch_function
    def leave_region(self, output: Any, wide: bool) -> Any:
        """Return a model's output at the global exponent; ``wide``: in float32 where it is float16."""
        return map_tensors(output, memoize_by_tensor(lambda x: self._move_to_global_exponent(x, wide)))

    def _move_to_global_exponent(self, out: Tensor, wide: bool) -> Tensor:
        if out.is_leaf:
            return out
        site = self.find_site(out)
        if wide and out.dtype == torch.float16:
            # The gradient takes its exponent before it is rounded to float16.
            left = out.float()
            node: Any = left.grad_fn
            node.register_prehook(self._backward.get_edge_hook(site, self._global_site))
        else:
            left = self.add_edge(out, site, self._global_site, leaving=True)
        mark_node_sites(left.grad_fn, self._global_site, self._global_site, self._global_site)
        # It is at the global exponent, wherever it goes.
        vars(left).pop(_SITE_ATTRIBUTE, None)
        return left


# Its ``apply`` is inherited from a class in C++.
_FUNCTION_BASE: Any = _SingleLevelFunction
_region_count_lock = threading.Lock()
_region_count = 0


def _watch_custom_functions(change: int) -> None:
    """Begin (1) or end (-1) a region, while any of which custom Functions are intercepted as they are applied.

    Function modes do not see them, and torch offers no other place where their arguments can be replaced before they
    run: their backward has to see gradients at the global exponent, and what reentrant checkpointing runs again needs
    edges of its own. So the method that ``Function.apply`` ends in is replaced, for the whole process.
    """
    global _region_count
    with _region_count_lock:
        _region_count += change
        if _region_count:
            _FUNCTION_BASE.apply = classmethod(_intercept_function)
        else:
            del _FUNCTION_BASE.apply


def _intercept_function(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    apply = super(_FUNCTION_BASE, cls).apply
    region = get_region()
    if (
        region is None
        or region.is_replaying
        or not torch.is_grad_enabled()
        or cls in (FloatWideningView, CopyWithStrides)
    ):
        return apply(*args, **kwargs)
    refuse_compiled_part()
    if cls is checkpoint.CheckpointFunction:
        args = (_make_recomputation(args[0], region), *args[1:])
    if region not in _get_current_function_mode_stack():
        # A part of an operator that the region runs now (torch.library.register_autograd), which has a site already.
        region._fail_recording()
        return apply(*args, **kwargs)
    # A Function may do with gradients what it likes: it sees those of the global exponent, as under any loss scale.
    return region.call_at_global_exponent(lambda moved: apply(*moved, **kwargs), args)


def _make_recomputation(run: Callable[..., Any], region: Region) -> Callable[..., Any]:
    """Return the function that reentrant checkpointing runs again during backward, with edges of its own."""

    def run_in_region(*args: Any, **kwargs: Any) -> Any:
        if get_region() is not None or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        region._backward.replayed = True
        with Region(region._backward, region._names) as again:
            again.path = list(region.path)
            return again.leave_region(run(*args, **kwargs), wide=False)

    return run_in_region
