"""Random histories of an optimizer, each lived twice: once as it is, once with all that must change no bit."""

import copy
import pickle
import random

import torch

import halfulp as hu

from .cases import RULES, UPDATES, allowed, differing, narrow_updates, snapshot, storable

# Half of the histories are AdamW's; the others have states that are no moments, or look at whole tensors.
KINDS = ("adamw",) * 4 + ("nadam", "lamb", "adafactor", "adamw-schedule-free")
SHAPES = ((6, 4), (5,), (3, 2, 2), (1,))


class World:
    """Named bfloat16 parameters, some cut from one tensor, and their optimizer."""

    def __init__(self, kind, groups, parameters, **options):
        self.kind, self.groups, self.parameters, self.options = kind, groups, parameters, options
        self.optimizer = self._made()

    def _made(self):
        first, *others = [[(name, self.parameters[name]) for name in group] for group in self.groups]
        optimizer = self.kind(first, **self.options)
        for group in others:
            optimizer.add_param_group({"params": group})
        return optimizer

    @property
    def model(self):
        return torch.nn.ParameterDict({name.replace(".", "_"): p for name, p in self.parameters.items()})

    def fresh(self):
        """A world of other numbers with the same groups."""
        parameters = {name: torch.nn.Parameter(torch.randn_like(p)) for name, p in self.parameters.items()}
        return World(self.kind, copy.deepcopy(self.groups), parameters, **self.options)


# What the run itself does: (world, chooser) -> nothing. Both lives draw the same numbers.


def step(world, chooser, of_all=False):
    generator = torch.Generator().manual_seed(chooser.randrange(2**40))
    names = sorted(world.parameters)
    without = chooser.choice(names) if not of_all and chooser.random() < 0.4 else None
    for name in names:
        gradient = torch.randn(world.parameters[name].shape, generator=generator).bfloat16()
        world.parameters[name].grad = None if name == without else gradient
    world.optimizer.step()


def _write(weight, value):
    """A write of the same bits is one in the run, and none to a file's or a copy's checksums."""
    if not torch.equal(weight, value):
        weight.copy_(value)


def clamp(world, chooser):
    weight = some(world, chooser)
    _write(weight, weight.clamp(-0.5, 0.5))


def mask(world, chooser):
    weight = some(world, chooser)
    _write(weight, torch.cat([torch.zeros_like(weight[:1]), weight[1:]]))


def project(world, chooser):
    weight = some(world, chooser)
    _write(weight, weight * (1.0 / weight.float().norm().clamp(min=1.0)).bfloat16())


def clamp_in_new_memory(world, chooser):
    weight = some(world, chooser)
    weight.data = weight.data.clamp(-0.7, 0.7)


def rate(world, chooser):
    for group in world.optimizer.param_groups:
        group["lr"] = chooser.choice((1e-3, 2e-3))


def new_group(world, chooser):
    generator = torch.Generator().manual_seed(chooser.randrange(2**40))
    name = f"new.{len(world.parameters)}"
    world.parameters[name] = torch.nn.Parameter(torch.randn(chooser.choice(SHAPES), generator=generator).bfloat16())
    world.groups.append([name])
    world.optimizer.add_param_group({"params": [(name, world.parameters[name])]})


def replaced(world, chooser):
    """Pruning and its like: another parameter stands in the place of one, and begins anew."""
    group = chooser.choice(world.optimizer.param_groups)
    position = chooser.randrange(len(group["params"]))
    name = group["param_names"][position]
    new = torch.nn.Parameter(group["params"][position].detach().flip(0).clone())
    world.parameters[name] = group["params"][position] = new


def float32_weights(world, chooser):
    held = world.optimizer.float32_state_dict(world.model)
    world.optimizer.load_float32_state_dict(world.model, {name: value * 0.75 for name, value in held.items()})


COMMON = (step, clamp, mask, project, clamp_in_new_memory, rate, new_group, replaced)
COMMON += (float32_weights,)
WEIGHTS = (12, 2, 1, 1, 1, 1, 0.5, 0.5, 0.5)


# What changes no bit: (world, chooser) -> the world that goes on.


def excursion(world, chooser):
    weight = some(world, chooser)
    old = weight.data
    weight.data = old + 0.125
    weight.data = old
    return world


def copied(world, chooser):
    return looked_at(copy.deepcopy(world), chooser)


def pickled(world, chooser):
    return looked_at(pickle.loads(pickle.dumps(world)), chooser)


def resumed(world, chooser):
    files = copy.deepcopy(({n: p.detach() for n, p in world.parameters.items()}, world.optimizer.state_dict()))
    new = world.fresh() if chooser.random() < 0.7 else world
    for name, value in files[0].items():
        new.parameters[name].copy_(value)
    new.optimizer.load_state_dict(files[1])
    return new


def looked_at(world, chooser):
    world.optimizer.float32_state_dict(world.model), world.optimizer.state_dict(), str(world.optimizer)
    return world


HARMLESS = (excursion, excursion, excursion, copied, pickled, resumed, resumed, looked_at)


def some(world, chooser):
    return world.parameters[chooser.choice(sorted(world.parameters))]


def live(seed: int, disturbed: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Live the history of a seed; return all bits at its end, and what happened."""
    chooser, other = random.Random(seed), random.Random(seed + 1)
    torch.manual_seed(seed)
    # Not cut from one tensor: those share a version counter, by which a write to one resets all.
    tensors = [torch.randn(shape).bfloat16() for shape in ((3, 4), (3, 4), (3, 4), *SHAPES)]
    parameters = {f"w.{k}": torch.nn.Parameter(tensor) for k, tensor in enumerate(tensors)}
    names = list(parameters)
    cut = chooser.randrange(1, len(names))
    update = chooser.choice(narrow_updates())
    rule = chooser.choice([rule for rule in KINDS if allowed(rule, update, "bf16")])
    states = storable(rule, chooser.choice((None, torch.float32, torch.bfloat16)))
    kind, given = RULES[rule]
    options = {**given, "lr": 1e-3, "weight_update": UPDATES[update], "state_dtype": states}
    world, told = World(kind, [names[:cut], names[cut:]], parameters, **options), [rule, update]
    with torch.no_grad(), hu.kernels.engine("reference"):
        step(world, chooser, of_all=True)
        for parameter in parameters.values():
            parameter.mul_(0.5)
        step(world, chooser, of_all=True)
        for _ in range(10):
            (act,) = chooser.choices(COMMON, WEIGHTS)
            for _ in range(other.randrange(3) if disturbed else 0):
                harmless = other.choice(HARMLESS)
                told.append(f"({harmless.__name__})")
                world = harmless(world, other)
            told.append(act.__name__)
            act(world, chooser)
        step(world, chooser, of_all=True)  # answers the writes since the last one
        return snapshot(world.optimizer), told


def differs(seed: int) -> str:
    """Return what differs between the two lives of a history; "" where nothing does."""
    (plain, _), (disturbed, told) = live(seed, False), live(seed, True)
    found = differing(plain, disturbed)
    return f"history {seed}: {', '.join(found)} after {' '.join(told)}" if found else ""
