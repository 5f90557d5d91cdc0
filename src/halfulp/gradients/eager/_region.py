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

from ...kernels import hide_own_frames_from_compiler
from ...kernels._threads import hold_while_forking
from .._functions import (
    classify_function,
    get_function_name,
    is_leaf_parameter,
    list_differentiable_tensors,
    list_second_factors,
    map_tensors,
    memoize_by_tensor,
)
from .._site import CopyWithStrides, Site, copy_keeping_strides, find_narrow_format
from ._backward import (
    FIRST_LEAF_SEQUENCE_NUMBER,
    BackwardHooks,
    GradientHook,
    GradientWideningView,
    refuse_float16_gradient,
    thread_region_state,
)

# Sets and returns what is not None while something that torch.compile was given runs. The function that only returns it
# gives up a reference to it each time in torch 2.6, until Python crashes.
_set_dynamo_callback = torch._C._dynamo.eval_frame.set_eval_frame


def is_inside_compiled_call() -> bool:
    """Return whether something that torch.compile was given runs."""
    callback = _set_dynamo_callback(None)
    if callback is not None:
        _set_dynamo_callback(callback)
    return callback is not None


def refuse_compiled_part() -> None:
    """Refuse a part of the model that is compiled by itself."""
    if torch.compiler.is_dynamo_compiling() or is_inside_compiled_call():
        raise NotImplementedError(
            "a part of the model is compiled by itself, and exponents cannot be put into its backward pass: compile "
            'the whole model with torch.compile(model, backend=scaler.backend("inductor")), or do not compile the part'
        )


class ModuleNameCache:
    """A cached map from parameters to the modules that hold them, looked up again for an unknown parameter."""

    def __init__(self, model: nn.Module, prefix: str) -> None:
        self._model = weakref.ref(model)
        self._prefix = f"{prefix}." if prefix else ""
        self._names: dict[int, str | None] = {}

    def find_holding_module_name(self, parameter: Tensor) -> str | None:
        """Return the qualified name of the module that holds a parameter; None where the model does not list it."""
        if id(parameter) not in self._names:
            model = self._model()
            listed = () if model is None else model.named_parameters()
            self._names |= {id(p): (self._prefix + name).rpartition(".")[0] or "model" for name, p in listed}
            self._names.setdefault(id(parameter), None)
        return self._names[id(parameter)]

    def list_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the qualified name of each module, with which its sites' keys begin, and the module."""
        model = self._model()
        for name, module in () if model is None else model.named_modules():
            yield (self._prefix + name).strip("."), module

    def is_sharded(self) -> bool:
        """Return whether parts of the model belong to FSDP, which computes with copies of its parameters."""
        from torch.distributed.fsdp import FSDPModule

        return any(isinstance(module, FSDPModule) for _, module in self.list_modules())


class CallRecording:
    """A record of a forward pass in a region: which call made each node, at which site, and which nodes are edges."""

    def __init__(self, learns: bool) -> None:
        # Whether no graph is learned from it: nobody asks, or the forward pass had what only a region can handle.
        self.has_failed = not learns
        # Each with its number.
        self.opened_sites: dict[Site, int] = {}
        self.edge_nodes: set[Any] = set()
        # 0-d results, which the model may keep besides its outputs (see `_replay.learn_graph`).
        self.scalar_results: list[weakref.ref] = []
        self._calls: list[tuple[int, int, Site]] = []

    def record_call_nodes(self, start_sequence_nr: int, site: Site) -> None:
        """Note that the nodes that were made since a sequence number are at a site."""
        if not self.has_failed and (end := torch._C._autograd._get_sequence_nr()) > start_sequence_nr:
            self._calls.append((start_sequence_nr, end, site))

    def add_edge_node(self, node: Any) -> None:
        """Note that a node is an edge; it is kept alive, with its graph, where a graph is learned."""
        if not self.has_failed:
            self.edge_nodes.add(node)

    def mark_failed(self) -> None:
        """Let the nodes go: no graph is learned."""
        self.has_failed = True
        self.edge_nodes.clear()

    def find_site(self, node: Any) -> Site | None:
        """Return the site of the call that made a node; None where none did."""
        number = node._sequence_nr()
        place = bisect.bisect_right(self._calls, number, key=lambda call: call[0])
        _, end, site = self._calls[place - 1] if place else (0, 0, None)
        return site if number < end else None


# Which of the gradients that a node passes on, and the hook that moves it.
SlotHooks = tuple[tuple[int, GradientHook], ...]


class ArgumentGradientMover:
    """Moves the gradients of a call's arguments that belong to other sites, by hooks of the nodes that read them.

    Hooks leave the graph as it is. A node in between, such as a view's, would send what several nodes of one call make
    as one sum: another number in the last bit where others read the tensor too.
    """

    def __init__(self, backward: BackwardHooks, site: Site) -> None:
        self._backward = backward
        self._site = site
        self.hooks_by_input: dict[tuple[Any, int], GradientHook] = {}
        # Leaves by identity, as their nodes may not be there before they are read; None: a parameter, whose gradient
        # leaves for the global exponent.
        self.leaf_hooks_by_id: dict[int, GradientHook | None] = {}
        # Of parameters.
        self.parameter_views: list[Tensor] = []

    def can_move_by_hook(self, tensor: Tensor) -> bool:
        """Return whether a hook can move a tensor's gradient; else it needs a view.

        That is so of a leaf under autocast, which would otherwise be cast once for calls at several sites, of a float16
        parameter, whose gradient leaves in float32, and where gradients are rounded to a format, once per argument.
        """
        if self._backward.format is not None:
            return False
        return not tensor.is_leaf or not (tensor.dtype == torch.float16 or torch._C._is_any_autocast_enabled())

    def run_function(
        self, recording: CallRecording, function: Callable, args: tuple, kwargs: dict, written: Tensor | None
    ) -> Any:
        """Call a function, and hook the nodes that read tensors of other sites; ``written``: what it writes into."""
        start_sequence_nr = torch._C._autograd._get_sequence_nr()
        out = function(*args, **kwargs)
        recording.record_call_nodes(start_sequence_nr, self._site)
        if self.hooks_by_input or self.leaf_hooks_by_id or self.parameter_views:
            self._hook_nodes_reading_arguments(
                out if written is None else [written, written._base],
                out if written is None else written,
                start_sequence_nr,
            )
        return out

    def _hook_nodes_reading_arguments(self, made: Any, out: Any, start_sequence_nr: int) -> None:
        """Hook the views of parameters, and the nodes behind ``made`` that read noted tensors."""
        if isinstance(out, list | tuple):
            out = next((x for x in out if isinstance(x, Tensor)), None)
        global_site = self._backward.sites.global_site
        made_in = out.dtype if isinstance(out, Tensor) else torch.float32
        leaving = self._backward.get_edge_hook(global_site, self._site, made_in)
        for view in self.parameter_views:
            node: Any = view.grad_fn
            if isinstance(node, GradientWideningView._backward_cls):
                node.hook = leaving
            else:
                node.register_prehook(leaving)
            node.metadata[global_site] = self._site
        if self.hooks_by_input or self.leaf_hooks_by_id:
            for node, moves in self._list_nodes_reading_arguments(made, leaving, start_sequence_nr):
                node.register_hook(_make_node_hook(self._backward, moves))
                # It is at the call's site; what it passes on may be at several.
                node.metadata[global_site] = self._site

    def _list_nodes_reading_arguments(
        self, made: Any, leaving: GradientHook, start_sequence_nr: int
    ) -> Iterator[tuple[Any, SlotHooks]]:
        """Yield the nodes of the call that read noted tensors, each with its hooks."""
        leaf_hooks = {leaf: hook or leaving for leaf, hook in self.leaf_hooks_by_id.items()}
        pending: list[Any] = [x.grad_fn for x in list_differentiable_tensors(made)]
        seen = {None}
        while pending:
            node = pending.pop()
            if node in seen or not start_sequence_nr <= node._sequence_nr() < FIRST_LEAF_SEQUENCE_NUMBER:
                continue
            seen.add(node)
            moves = []
            for slot, link in enumerate(node.next_functions):
                source, hook = link[0], self.hooks_by_input.get(link)
                if (
                    leaf_hooks
                    and hook is None
                    and source is not None
                    and source._sequence_nr() >= FIRST_LEAF_SEQUENCE_NUMBER
                ):
                    hook = leaf_hooks.get(id(source.variable))
                if hook is None:
                    pending.append(source)
                else:
                    moves.append((slot, hook))
            if moves:
                yield node, tuple(moves)


def _make_node_hook(backward: BackwardHooks, moves: SlotHooks) -> Callable:
    """Return a hook that moves some of the gradients that a node passes on."""
    if moves not in backward.reader_hooks:

        @hide_own_frames_from_compiler
        def move_gradients(gradients: tuple, given: tuple) -> tuple | None:
            if not backward.is_active:
                # Whether that is for a second derivative's sake.
                backward.has_inactive_hooks()
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
    Where an input belongs elsewhere, hooks of the nodes that read it move its gradient back (`ArgumentGradientMover`).
    """

    is_replaying = False

    def __init__(self, backward: BackwardHooks, names: ModuleNameCache, learns: bool = False) -> None:
        super().__init__()
        self.path: list[str] = []
        self._backward = backward
        self._global_site = backward.sites.global_site
        self._names = names
        self._call_counts: Counter[str] = Counter()
        self.recording = CallRecording(learns)

    def __enter__(self) -> Region:
        self._outer = thread_region_state.region
        self._backward.deactivate_hooks_outside_backward()
        self.start_sequence_nr = torch._C._autograd._get_sequence_nr()
        super().__enter__()
        thread_region_state.region = self
        _update_custom_function_interception(1)
        return self

    def __exit__(self, *error: object) -> None:
        _update_custom_function_interception(-1)
        thread_region_state.region = self._outer
        self._backward.forward_count += 1
        super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        refuse_compiled_part()
        if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return function(*args, **kwargs)
        differentiable = list(list_differentiable_tensors((args, kwargs)))
        if not differentiable:
            return function(*args, **kwargs)
        kind = classify_function(function)
        if kind == "shape":
            # Only the first argument has a gradient.
            differentiable = list(list_differentiable_tensors(args[:1]))
        if kind == "fact" or not differentiable:
            return function(*args, **kwargs)
        if kind == "property":
            out = function(*args)
            if not isinstance(out, Tensor) or not out.requires_grad or out.is_leaf:
                return out
            kind = "plain"  # such as ``x.mT``, which carries the tensor's gradient
        if kind == "in-place":
            return self._run_in_place_function(function, args, kwargs, differentiable)
        site = self._find_call_site(kind, function, args, differentiable)
        mover = ArgumentGradientMover(self._backward, site)
        # Views run in the reverse of the order they are made in, and arms of a join must add up in the plain order.
        taken = 1 if kind == "shape" else len(args)
        kwargs = kwargs if kind == "shape" else self._move_arguments(kwargs, site, mover, function)
        given = (*self._move_arguments(args[:taken], site, mover, function), *args[taken:])
        out = mover.run_function(self.recording, function, given, kwargs, None)
        made = self._set_result_sites(out, site, kind, mover)
        watches = kind == "product" and self._backward.is_measuring and self._backward.policy.wants_operands
        if watches and isinstance(out, Tensor) and not out.is_leaf:
            node: Any = out.grad_fn
            for factor in list_second_factors(function, args, kwargs):
                node.register_prehook(self._backward.make_exponent_proposing_hook(site, factor))
        return made

    def mark_arguments_at_global_exponent(self, arguments: Any) -> None:
        """Put the model's arguments at the global exponent, whichever thread made them."""
        with torch._C.DisableTorchFunction():
            for x in list_differentiable_tensors(arguments):
                if self._get_assigned_site(x) is None:
                    self._backward.mark_node_at_global_exponent(x.grad_fn)

    # sites ----------------------------------------------------------------------------------------------------

    def find_site(self, tensor: Tensor) -> Site:
        """Return the site of a tensor's gradient; tensors made before the region are at the global one."""
        site = self._get_assigned_site(tensor)
        if site is None and tensor._base is not None:
            site = self._get_assigned_site(tensor._base)
        # With second derivatives all gradients have the global exponent until the next update, whatever made them.
        if site is None and not self._backward.uses_one_scale:
            node: Any = tensor.grad_fn
            made_here = node is not None and self.start_sequence_nr <= node._sequence_nr() < FIRST_LEAF_SEQUENCE_NUMBER
            if made_here and node.metadata.get(self._global_site) is not self._global_site:
                raise NotImplementedError(
                    f"a tensor of shape {list(tensor.shape)} was made inside {'.'.join(self.path) or 'the model'} by "
                    f"{node.name()}, which is no torch function that can be watched (an extension, or a transform of "
                    "torch.func): call it inside a torch.autograd.Function, or take policy='dynamic'"
                )
            self._backward.mark_node_at_global_exponent(node)
        return site or self._global_site

    def _get_assigned_site(self, tensor: Tensor) -> Site | None:
        """Return the site that a region of this scaler gave a tensor."""
        site = getattr(tensor, _SITE_ATTRIBUTE, None)
        return site if site is None or site is self._global_site or site.global_site is self._global_site else None

    def _find_call_site(self, kind: str, function: Callable, args: tuple, differentiable: list[Tensor]) -> Site:
        """Return the site of a function's inputs and results; of a cell that of its state, if any."""
        if kind == "cell":
            state = next(list_differentiable_tensors(args[1]), None) if len(args) > 1 else None
            site = self._global_site if state is None or is_leaf_parameter(state) else self.find_site(state)
            return self._open_site(function, differentiable) if site is self._global_site else site
        return (self._open_site if kind == "product" else self._find_latest_site)(function, differentiable)

    def _open_site(self, function: Callable, differentiable: list[Tensor]) -> Site:
        """Return the site of this call of a product."""
        parameter = next((x for x in differentiable if is_leaf_parameter(x)), None)
        module = None if parameter is None else self._names.find_holding_module_name(parameter)
        key = module or ".".join([*self.path[-1:], get_function_name(function)])
        call = self._call_counts[key]
        self._call_counts[key] = call + 1
        site = self._backward.sites.get_or_create_site(f"{key}#{call}" if call else key)
        opened = self.recording.opened_sites
        opened[site] = len(opened)
        self._backward.reached_sites.setdefault(site)
        return site

    def _find_latest_site(self, function: Callable, differentiable: list[Tensor]) -> Site:
        """Return the latest site of a function's inputs; a new site if it reads only parameters."""
        sites = [self.find_site(x) for x in differentiable if not is_leaf_parameter(x)]
        if not sites:
            return self._open_site(function, differentiable)
        return sites[0] if len(sites) == 1 else max(sites, key=lambda site: self.recording.opened_sites.get(site, -1))

    # edges ----------------------------------------------------------------------------------------------------

    def _move_arguments(
        self, value: Any, site: Site, mover: ArgumentGradientMover | None, function: Callable | None = None
    ) -> Any:
        """Return arguments whose gradients all leave ``site``, or are noted in ``mover`` and will.

        A composite function may ask whether two arguments are one tensor, so that they must stay one.
        """

        def move_gradient(x: Tensor) -> Tensor:
            if is_leaf_parameter(x):
                return self._get_parameter_for_site(x, site, mover, function)
            source = self.find_site(x)
            if mover is None or source is site or not mover.can_move_by_hook(x):
                return self.insert_edge_between_sites(x, source, site)
            hook = self._backward.get_edge_hook(source, site)
            if x.is_leaf:
                mover.leaf_hooks_by_id[id(x)] = hook
            else:
                mover.hooks_by_input[x.grad_fn, x.output_nr] = hook
            return x

        return map_tensors(
            value, memoize_by_tensor(move_gradient) if isinstance(function, FunctionType) else move_gradient
        )

    def _get_parameter_for_site(
        self, parameter: Tensor, site: Site, mover: ArgumentGradientMover | None, function: Callable | None
    ) -> Tensor:
        """Return a parameter for a reader at ``site``: itself, or a view whose gradient leaves the site."""
        refuse_float16_gradient(parameter, self._names.is_sharded)
        known = self._names.find_holding_module_name(parameter) is not None and type(parameter) is nn.Parameter
        if not known or parameter.dtype == torch.float16:
            self.recording.mark_failed()
        if site is self._global_site or mover is None:
            return parameter
        if mover.can_move_by_hook(parameter):
            mover.leaf_hooks_by_id[id(parameter)] = None
            return parameter
        if parameter.dtype == torch.float16:
            view = GradientWideningView.apply(parameter)
        elif function is not None and get_function_name(function).startswith("embedding"):
            view = torch.ops.aten.alias.default(parameter)  # which takes sparse gradients
        else:
            view = parameter.view_as(parameter)
        mover.parameter_views.append(view)
        self.recording.add_edge_node(view.grad_fn)
        return view

    def insert_edge_between_sites(self, tensor: Tensor, source: Site, target: Site, leaving: bool = False) -> Tensor:
        """Return a view or copy for a reader at ``target``; ``leaving``: a reader that may write into it."""
        if source is target:
            return tensor
        # A write into a view would go round the hook.
        viewed = tensor.layout is torch.strided and not leaving
        out = tensor.view_as(tensor) if viewed else copy_keeping_strides(tensor)
        node: Any = out.grad_fn
        node.register_prehook(self._backward.get_edge_hook(source, target))
        self.recording.add_edge_node(node)
        node.metadata[self._global_site] = target
        setattr(out, _SITE_ATTRIBUTE, target)
        return out

    # results --------------------------------------------------------------------------------------------------

    def _run_in_place_function(
        self, function: Callable, args: tuple, kwargs: dict, differentiable: list[Tensor]
    ) -> Any:
        """Run a function that writes into its first argument, whose site does not change."""
        if args and isinstance(args[0], list | tuple):
            name = get_function_name(function)
            raise NotImplementedError(
                f"{name} in {'.'.join(self.path) or 'the model'} writes into several tensors whose gradients may have "
                f"exponents of their own: write into each, or take {name.rstrip('_')}"
            )
        written = args[0] if args and isinstance(args[0], Tensor) else differentiable[0]
        site = self.find_site(written) if written.requires_grad else self._find_latest_site(function, differentiable)
        mover = ArgumentGradientMover(self._backward, site)
        kwargs = self._move_arguments(kwargs, site, mover)
        given = (written, *self._move_arguments(args[1:], site, mover)) if args else ()
        out = mover.run_function(self.recording, function, given, kwargs, written)
        for x in (written, written._base):
            if x is not None and x.requires_grad and not x.is_leaf:
                self._set_site(x, getattr(x, _SITE_ATTRIBUTE, site))
        return out

    def _set_result_sites(self, out: Any, site: Site, kind: str, mover: ArgumentGradientMover | None = None) -> Any:
        """Assign the new tensors of a function's results to ``site``, and return the results."""
        rounds = self._backward.format is not None and kind in ("product", "cell")
        rounding_nodes: set = set()

        def set_result_site(out: Tensor) -> Tensor:
            if out.is_leaf or (mover is not None and (out.grad_fn, out.output_nr) in mover.hooks_by_input):
                # One of the arguments that were read stays at its site.
                return out
            if kind == "product":
                site.product_format = find_narrow_format(out.dtype)
            if rounds and kind == "cell":
                # A cell reads its own results, too, as it does the new state: a copy's gradient is what others send.
                out = copy_keeping_strides(out)
            if rounds and out.grad_fn not in rounding_nodes:
                node: Any = out.grad_fn
                rounding_nodes.add(node)
                node.register_prehook(self._backward.round_gradients)
            if out.dim() or site is self._global_site or out._is_view():
                return self._set_site(out, site)
            # Numbers are losses: they may leave the model by other ways than its output.
            out = self.insert_edge_between_sites(out, site, self._global_site, leaving=True)
            self.recording.scalar_results.append(weakref.ref(out))
            return self._set_site(out, self._global_site)

        return map_tensors(out, set_result_site)

    def _set_site(self, out: Tensor, site: Site) -> Tensor:
        """Set a tensor's site; at the global exponent, mark its node as an exit."""
        setattr(out, _SITE_ATTRIBUTE, site)
        if site is self._global_site:
            node: Any = out.grad_fn
            node.metadata[site] = site
        return out

    def call_at_global_exponent(self, apply: Callable, args: tuple, kwargs: dict) -> Any:
        """Call a function with its incoming and outgoing gradients at the global exponent; return its results."""
        self.recording.mark_failed()
        with torch._C.DisableTorchFunction():
            moved = self._move_arguments(args, self._global_site, None)
            versions = [x._version for x in list_differentiable_tensors(moved)]
            out = apply(*moved, **kwargs)
            if versions != [x._version for x in list_differentiable_tensors(moved)]:
                raise NotImplementedError(
                    f"a custom Function in {'.'.join(self.path[-1:]) or 'the model'} writes into its argument, whose "
                    "gradient then goes round the exponents: let it work on a clone"
                )
            return self._set_result_sites(out, self._global_site, "plain")

    def move_output_to_global_exponent(self, output: Any, wide: bool) -> Any:
        """Return a model's output at the global exponent; ``wide``: in float32 where it is float16."""

        def move_to_global_exponent(out: Tensor) -> Tensor:
            if out.is_leaf:
                return out
            site = self.find_site(out)
            if wide and out.dtype == torch.float16:
                # The gradient takes its exponent before it is rounded to float16.
                left = out.float()
                node: Any = left.grad_fn
                node.register_prehook(self._backward.get_edge_hook(site, self._global_site))
            else:
                left = self.insert_edge_between_sites(out, site, self._global_site, leaving=True)
                node = left.grad_fn
            node.metadata[self._global_site] = self._global_site
            # It is at the global exponent, wherever it goes.
            vars(left).pop(_SITE_ATTRIBUTE, None)
            return left

        with torch._C.DisableTorchFunction():
            return map_tensors(output, memoize_by_tensor(move_to_global_exponent))


# Its ``apply`` is inherited from a class in C++.
_AUTOGRAD_FUNCTION_BASE: Any = _SingleLevelFunction
_active_region_count_lock = threading.Lock()
hold_while_forking(_active_region_count_lock)
_active_region_count = 0


def _update_custom_function_interception(change: int) -> None:
    """Begin (1) or end (-1) a region, while any of which custom Functions are intercepted as they are applied.

    Function modes do not see them: the method that ``Function.apply`` ends in is replaced, for the whole process.
    """
    global _active_region_count
    with _active_region_count_lock:
        _active_region_count += change
        if _active_region_count:
            _AUTOGRAD_FUNCTION_BASE.apply = classmethod(_intercept_function_apply)
        else:
            del _AUTOGRAD_FUNCTION_BASE.apply


def _intercept_function_apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    apply = super(_AUTOGRAD_FUNCTION_BASE, cls).apply
    region = thread_region_state.region
    if (
        region is None
        or region.is_replaying
        or not torch.is_grad_enabled()
        or cls in (GradientWideningView, CopyWithStrides)
    ):
        return apply(*args, **kwargs)
    refuse_compiled_part()
    if cls is checkpoint.CheckpointFunction:
        run, *rest = args
        args = (functools.partial(_rerun_checkpoint_in_region, run, region), *rest)
    if region not in _get_current_function_mode_stack():
        # A part of an operator that the region runs now (torch.library.register_autograd), which has a site already.
        region.recording.mark_failed()
        return apply(*args, **kwargs)
    # A Function may do with gradients what it likes: it sees those of the global exponent, as under any loss scale.
    return region.call_at_global_exponent(apply, args, kwargs)


def _rerun_checkpoint_in_region(run: Callable[..., Any], region: Region, *args: Any, **kwargs: Any) -> Any:
    """Run what reentrant checkpointing runs again during backward, with edges of its own."""
    if thread_region_state.region is not None or not torch.is_grad_enabled():
        return run(*args, **kwargs)
    backward = region._backward
    with Region(backward, region._names) as again:
        again.path = list(region.path)
        out = again.move_output_to_global_exponent(run(*args, **kwargs), wide=False)

    def add_join_hook(x: Tensor) -> Tensor:
        if x.is_leaf:
            return x
        # Its hook is called before those of edges.
        x = torch.ops.aten.alias.default(x)
        node: Any = x.grad_fn
        node.register_prehook(backward.join_scaled_pass)
        return x

    return map_tensors(out, add_join_hook) if backward.is_in_scaled_pass() else out
