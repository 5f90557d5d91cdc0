"""The hooks that move, round and measure gradients while a scaled loss is differentiated."""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from ..._torch_versions import HAS_GRADIENT_DTYPE
from ...formats import Format
from ...kernels import hide_own_frames_from_compiler
from ...rounding import Rounding, quantize
from .._functions import SecondFactor
from .._policy import Policy
from .._site import LossGradientFollower, PendingMeasurements, Site, Sites, find_narrow_format

# Sequence numbers of nodes that accumulate into leaves, which many threads may share.
FIRST_LEAF_SEQUENCE_NUMBER = 2**62
# How many forward passes without edges are remembered: of one iteration, and of those before.
_MAX_UNMARKED_PASSES, _MAX_EARLIER_UNMARKED_PASSES = 4096, 64


def list_nodes_reached_by_backward(nodes: Iterable[Any], is_end: Callable[[Any], bool]) -> Iterator[Any]:
    """Return the nodes that a backward pass from some nodes reaches, each once, up to those that ``is_end`` picks."""
    seen: set[Any] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if not is_end(node):
            pending += [following for following, _ in node.next_functions]


GradientHook = Callable[[tuple], tuple | None]
# By handle: what compiled graphs know of a scaler.
BACKWARD_HOOKS_BY_HANDLE: weakref.WeakValueDictionary[str, BackwardHooks] = weakref.WeakValueDictionary()
_handle_counter = itertools.count()


class _ThreadState(threading.local):
    # The region, or the replay of a known graph, that this thread is in; None outside of both.
    region: Any = None


thread_region_state = _ThreadState()


class GradientWideningView(torch.autograd.Function):
    """A view of a float16 parameter whose gradient its node's ``hook`` makes float32: others may change no dtype."""

    @staticmethod
    def forward(ctx, parameter: Tensor) -> Tensor:
        """Return the values unchanged, in a new tensor."""
        return parameter.view_as(parameter)

    @staticmethod
    @hide_own_frames_from_compiler
    def backward(ctx, gradient: Tensor) -> Tensor:
        """Return the gradient after the edge's hook."""
        changed = ctx.hook((gradient,))
        return gradient if changed is None else changed[0]


class BackwardHooks:
    """Holds the hooks (edges) that move a gradient from one site's exponent to another's in a backward pass.

    All edges are shut but during a backward pass that started at ``scaler.scale(loss)``: whatever else is
    differentiated sees true gradients, as every path from a loss to a parameter ends at the exponent at which it began.
    The metadata of nodes tell the site at whose exponent their gradient arrives, by the scaler's global site.
    """

    def __init__(self, sites: Sites, policy: Policy, format: Format | None, rounding: Rounding) -> None:
        self.sites = sites
        self.policy = policy
        self.format = format
        self._rounding = rounding
        # Where one scale holds for all and nobody looks, GradScaler's own graph is all that is needed.
        self.is_idle = not policy.per_site and not policy.measures and format is None
        # Looks for the processes that add their gradients to these.
        self.update_process_groups: Callable[[], None] = lambda: None
        self.is_active = False
        self.is_measuring = True
        self.pass_count = 0
        self.uses_one_scale = False
        # The graph tasks of the scaled backward pass: its own, and those of reentrant checkpoints in it.
        self._graph_task_ids: set[int] = set()
        self.measurements = PendingMeasurements()
        # Of the latest forward passes without edges, autograd's sequence numbers before and after; and their number.
        self.unmarked_sequence_ranges: deque[tuple[int, int]] = deque(maxlen=_MAX_UNMARKED_PASSES)
        self.replay_count = 0
        self._may_replay = True
        self.loss_follower = LossGradientFollower(
            sites, policy.per_site and policy.measures and not policy.wants_operands
        )
        # The sites of this iteration's forward and backward passes.
        self.reached_sites: dict[Site, None] = {}
        self.forward_count = 0
        self._has_checked_watching = False
        # By a site and one that passes gradients to it.
        self.edge_hooks: dict[tuple[Site, Site], GradientHook] = {}
        self._weight_edge_hooks: dict[tuple[Site, Format | None], GradientHook] = {}
        # Of nodes that read several tensors.
        self.reader_hooks: dict[tuple, Callable] = {}
        self._has_warned_of_second_order = False
        # What compiled graphs know it by, the edges that they name, and whose parameters they name.
        self.handle = str(next(_handle_counter))
        self.edges_by_json: dict[str, tuple[list[Site], list[tuple[Site, Site]]]] = {}
        self.name_caches: weakref.WeakSet = weakref.WeakSet()
        BACKWARD_HOOKS_BY_HANDLE[self.handle] = self

    # what a backward pass goes through ----------------------------------------------------------------------

    @hide_own_frames_from_compiler
    def activate_edge_hooks(self, gradients: tuple) -> None:
        """Activate the edges until this backward pass ends (the hook of a scaled loss's node)."""
        if torch.is_grad_enabled():
            self._use_one_scale_for_second_order()
        self.pass_count += 1
        if self.uses_one_scale or self.is_active:
            return
        self.is_active = True
        self.loss_follower.reset_lift_for_backward_pass(self.is_measuring)
        self._graph_task_ids = {torch._C._current_graph_task_id()}
        Variable._execution_engine.queue_callback(self.deactivate_edge_hooks)

    @hide_own_frames_from_compiler
    def deactivate_edge_hooks(self) -> None:
        """Deactivate the edges."""
        self.is_active = False

    def deactivate_hooks_outside_backward(self) -> None:
        """Deactivate the edges unless a backward pass runs, also after one that raised."""
        if not is_in_backward_pass():
            self.deactivate_edge_hooks()

    def refuse_tensors_from_inside_models(self, node: Any) -> None:
        """Check that a tensor read outside of models depends on their forward passes through their outputs only."""
        # From any other tensor of a model every path leads over an edge, and all edges are marked.
        global_site = self.sites.global_site
        behind = list(list_nodes_reached_by_backward([node], lambda one: global_site in one.metadata))
        marks = {one: one.metadata[global_site] for one in behind if global_site in one.metadata}
        site = next((mark for mark in marks.values() if mark is not global_site), None)
        if site is not None:
            raise ValueError(
                f"a tensor from inside the model, at {site.key!r}, is read outside, by the loss or on its way into "
                "another forward pass, and is not part of the model's output, such as one kept in an attribute, or in "
                "an object other than a list, tuple, dict or data class, or by a forward hook: return it from forward "
                "in one of these, or take policy='dynamic', one scale for all (numbers that a function computed, which "
                "may be losses of their own, may be kept anywhere)"
            )
        # A forward pass without edges cannot be told from other ways by its marks.
        numbers = [one._sequence_nr() for one in behind if one not in marks]
        if any(begin <= number < end for begin, end in self.unmarked_sequence_ranges for number in numbers):
            self.fall_back_to_one_scale()

    def mark_node_at_global_exponent(self, node: Any) -> None:
        """Mark a node that was made before a forward pass as one at the global exponent."""
        global_site = self.sites.global_site
        if node is not None and node.metadata.get(global_site) is not global_site:
            self.refuse_tensors_from_inside_models(node)
            node.metadata[global_site] = global_site

    def fall_back_to_one_scale(self) -> None:
        """Use one global scale until the next update, and never replay a known graph again."""
        self.uses_one_scale, self._may_replay = True, False
        # A backward pass that runs had its gradients moved by edges, and goes on so.
        self.deactivate_hooks_outside_backward()

    def is_replay_allowed(self) -> bool:
        """Return whether the next forward pass may run without a region, as nothing is measured or rounded."""
        wanted = self._may_replay and not self.is_measuring and not self.uses_one_scale and self.format is None
        return wanted and not torch._C._len_torch_dispatch_stack()

    def warn_if_no_watched_forward_ran(self) -> None:
        """Warn, once, where a scaled loss came from no forward pass that has sites: one scale holds for all then."""
        if self._has_checked_watching or self.is_idle:
            return
        self._has_checked_watching = True
        if not self.reached_sites and not self.forward_count:
            warnings.warn(
                "the scaled loss came from no forward pass of the scaler's model, so that one scale holds for all "
                "gradients: call the model itself, not its parts or methods, or make the scaler of what is called",
                stacklevel=3,
            )

    def end_iteration(self) -> None:
        """Clear the iteration's counts, measurements and reached sites."""
        self.deactivate_edge_hooks()
        self.pass_count = self.forward_count = 0
        self.uses_one_scale = False
        self.measurements.unread_statistics.clear()
        self.loss_follower.loss_gradient_binades.clear()
        self.reached_sites.clear()
        while len(self.unmarked_sequence_ranges) > _MAX_EARLIER_UNMARKED_PASSES:
            self.unmarked_sequence_ranges.popleft()

    def get_edge_hook(self, receiver: Site, sender: Site, weight_dtype: torch.dtype | None = None) -> GradientHook:
        """Return the hook of an edge that takes a gradient at ``sender``'s exponent to ``receiver``'s.

        ``weight_dtype``: of a parameter's gradient, on its way to the global exponent, the dtype that it is made in.
        """
        narrow = None if weight_dtype is None else find_narrow_format(weight_dtype)
        hooks: dict[Any, GradientHook] = self.edge_hooks if weight_dtype is None else self._weight_edge_hooks
        key = (receiver, sender) if weight_dtype is None else (sender, narrow)
        if key in hooks:
            return hooks[key]

        @hide_own_frames_from_compiler
        def move_gradient(gradients: tuple) -> tuple | None:
            gradient = gradients[0]
            if self.has_inactive_hooks() or gradient is None:
                return None
            if weight_dtype is None:
                self.reached_sites[receiver] = None
                changed = self._round_and_measure_gradient(gradient, sender, "passed", sender.product_format)
            else:
                changed = self._round_and_measure_gradient(gradient, sender, "weight", narrow)
                # A float16 parameter sums its gradients in float32 (`refuse_float16_gradient`): leaving is exact there.
                changed = changed.float() if changed.dtype == torch.float16 else changed
            changed = self.loss_follower.rescale_gradient_between_sites(changed, receiver, sender)
            if receiver is not self.sites.global_site:
                changed = self._round_and_measure_gradient(changed, receiver, "received", receiver.product_format)
            return None if changed is gradient else (changed,)

        hooks[key] = move_gradient
        return move_gradient

    def _round_and_measure_gradient(self, gradient: Tensor, site: Site, kind: str, narrow: Format | None) -> Tensor:
        """Return a gradient as a site stores it, and measure it; at the global exponent products read none."""
        stored = None if site is self.sites.global_site else self.format or narrow
        if stored is self.format:
            gradient = self.round_to_format(gradient)
        # What is received in a wide format cannot leave its range.
        if self.is_measuring and (stored is not None or kind != "received"):
            self.measurements.measure_gradient_on_device(site, kind, gradient, stored)
        return gradient

    @hide_own_frames_from_compiler
    def round_gradients(self, gradients: tuple) -> tuple | None:
        """Round a product's incoming gradients to the format (the hook of its result)."""
        if self.has_inactive_hooks():
            return None
        return tuple(None if gradient is None else self.round_to_format(gradient) for gradient in gradients)

    def round_to_format(self, gradient: Tensor) -> Tensor:
        """Round a gradient to the format; an overflow becomes infinity, or NaN in a format without infinities."""
        if self.format is None:
            return gradient
        if gradient.is_complex():
            return torch.view_as_complex(self.round_to_format(torch.view_as_real(gradient)))
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            return torch.sparse_coo_tensor(
                gradient.indices(), self.round_to_format(gradient.values()), gradient.shape, is_coalesced=True
            )
        overflow = "inf" if self.format.infinities else "nan"
        return quantize(gradient, self.format, self._rounding, overflow=overflow)

    def make_exponent_proposing_hook(self, site: Site, factor: SecondFactor) -> GradientHook:
        """Return a hook of a product's result that shows the policy both factors."""

        @hide_own_frames_from_compiler
        def propose_bounds_from_operands(gradients: tuple) -> None:
            stored, gradient = self.format or site.product_format, gradients[0]
            if self.is_in_scaled_pass() and gradient is not None and stored is not None:
                proposal = self.policy.propose_exponent_bounds(site, factor.align_operands(gradient), stored)
                if proposal is not None:
                    site.proposed_bounds.append(proposal)

        return propose_bounds_from_operands

    def has_inactive_hooks(self) -> bool:
        """Return whether edges are inactive, as they are for a whole iteration with a second derivative."""
        if not self.is_active:
            if torch.is_grad_enabled() and not self.uses_one_scale:
                self._use_one_scale_for_second_order()
            return True
        return not self.is_in_scaled_pass()

    def is_in_scaled_pass(self) -> bool:
        """Return whether this thread differentiates the scaled loss, and not another one in a hook of its graph."""
        return self.is_active and torch._C._current_graph_task_id() in self._graph_task_ids

    @hide_own_frames_from_compiler
    def join_scaled_pass(self, gradients: tuple) -> None:
        """Let a backward pass that begins here, a reentrant checkpoint's, be a part of the scaled one (a hook)."""
        self._graph_task_ids.add(torch._C._current_graph_task_id())

    def _use_one_scale_for_second_order(self) -> None:
        """Deactivate the edges until the next update, and warn, once."""
        self.uses_one_scale = True
        self.is_active = False
        if not self._has_warned_of_second_order:
            self._has_warned_of_second_order = True
            warnings.warn(
                "gradients are taken with create_graph=True: what is differentiated again has one global scale until "
                "scaler.update(), as in torch.amp.GradScaler (said once)",
                stacklevel=2,
            )


def is_in_backward_pass() -> bool:
    """Return whether this thread is in a backward pass."""
    return torch._C._current_graph_task_id() != -1


def refuse_float16_gradient(parameter: Tensor, is_sharded: Callable[[], bool] = lambda: False) -> None:
    """Refuse a float16 parameter with a float16 gradient, which could not be unscaled without rounding."""
    if parameter.dtype != torch.float16 or getattr(parameter, "grad_dtype", torch.float16) != torch.float16:
        return
    if HAS_GRADIENT_DTYPE and is_sharded():
        # FSDP holds float16 copies of float32 parameters: their gradients become float32 before they are reduced.
        parameter.grad_dtype = torch.float32
        return
    raise TypeError(
        f"a parameter of shape {list(parameter.shape)} is float16 and so is its gradient, which cannot be unscaled "
        "without losing what the scale saved: call halfulp.float32_gradients(model) before, and step with an "
        "optimizer of halfulp.optim; or keep float32 parameters under torch.autocast"
    )
