"""Which instructions of a trace are computed when: in halves of a block, in stages of a loop, and in what order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .._device_function import STREAM
from .._trace import Trace

# Cycles after which a result is there, where they are more than one.
_LATENCY = {"sqrt": 20, "div": 13, "add": 3, "sub": 3, "mul": 3, "word_mul": 3, "select": 2, "to_real": 3, "to_word": 3}
# Operations that are computed again behind a block's largest words, rather than kept: their operands are no larger.
_AGAIN = ("bits", "to_float64")
# Operations so slow that what needs them is computed one turn of the loop later.
_SLOW = ("sqrt",)


@dataclass(frozen=True)
class Phases:
    """The instructions of a trace by what they need of a block's largest words.

    Attributes:
        largest: those that find one.
        before: those that need none, and read elements, or are of constants and counters alone.
        uniform: those of largest words and constants, and what they are computed from.
        waiting: those of them that need a largest word, and those that find one.
        behind: all others.
        behind_and_free: those, and what constants and counters alone give, which is computed again.
        crossing: values from before that are needed behind.
    """

    largest: list[int]
    before: set[int]
    uniform: set[int]
    waiting: list[int]
    behind: set[int]
    behind_and_free: set[int]
    crossing: list[int]

    def of_blocks(self, trace: Trace) -> list[int]:
        """Return which instructions have one result per block that is kept: largest words, and what is used of them."""
        used = {operand for k in self.behind for operand in trace.lines[k][1]}
        used |= {line for array, line in trace.stores.items() if array[2]} | {number for _, number in trace.sums}
        return [k for k in self.waiting if k in self.largest or k in used]

    @classmethod
    def of(cls, trace: Trace) -> Phases:
        """Return the phases of a trace."""
        reads: set[int] = set()
        waits: set[int] = set()  # for the block's largest
        varies: set[int] = set()  # between the elements of a block
        for k, (name, operands, extra) in enumerate(trace.lines):
            if name == "block_largest":
                assert not waits & set(operands), "a block has one round of largest words"
                waits.add(k)
                continue
            if waits & set(operands):
                waits.add(k)
            elif name == "load" or reads & set(operands):
                reads.add(k)
            if name == "load" or (name == "input" and extra == STREAM[0]) or varies & set(operands):
                varies.add(k)
        everything = set(range(len(trace.lines)))
        largest = [k for k in sorted(waits) if trace.lines[k][0] == "block_largest"]
        uniform = waits - varies - set(largest)
        behind = waits - uniform - set(largest)
        needed, crossing = [operand for k in sorted(behind) for operand in trace.lines[k][1]], set()
        while needed:
            k = needed.pop()
            if k in reads and (trace.kinds[k] == "mask" or trace.lines[k][0] in _AGAIN):
                behind.add(k)
                needed += trace.lines[k][1]
            elif k in reads:
                crossing.add(k)
        free = everything - waits - reads
        both = {k for k in free & varies if trace.kinds[k] != "mask"} & with_operands(trace, behind)
        both &= with_operands(trace, [*crossing, *used_before(trace, waits)])
        # What is computed in both loops, such as a hash of the counter, is kept instead, but for what it is made from.
        crossing |= {k for k in both if k not in {n for other in both for n in trace.lines[other][1]}}
        return cls(
            largest=largest,
            before=everything - waits,
            uniform=with_operands(trace, uniform) - set(largest),
            waiting=sorted(uniform | set(largest)),
            behind=behind,
            behind_and_free=behind | free,
            crossing=sorted(crossing),
        )


@dataclass(frozen=True)
class Stages:
    """The instructions of a trace in stages: a turn of a loop computes each for other elements.

    A processor looks ahead by some hundred instructions: if all that waits for a root or a quotient follows it at once,
    there is little else to do meanwhile.

    Attributes:
        of: the stages' instructions; those of constants alone are in all.
        crossing: per stage but the last, which values of it or of earlier ones later ones need.
    """

    of: list[set[int]]
    crossing: list[list[int]]

    @classmethod
    def of_trace(cls, trace: Trace, several: bool) -> Stages:
        """Return the stages of a trace; each instruction is in the last in which it still comes in time.

        Args:
            trace: what is computed.
            several: whether there may be more than one stage.
        """
        lines = trace.lines
        varies: set[int] = set()
        for k, (name, operands, extra) in enumerate(lines):
            if name == "load" or (name == "input" and extra == STREAM[0]) or varies & set(operands):
                varies.add(k)
        before = [0] * len(lines)  # stages that are left behind an instruction
        until = [0] * len(lines)
        for k in reversed(range(len(lines))):
            if k not in varies:
                continue
            before[k] += several and lines[k][0] in _SLOW
            for operand in lines[k][1]:
                before[operand] = max(before[operand], before[k])
        count = 1 + max((before[k] for k in varies), default=0)
        stage = [count - 1 - left for left in before]
        for k in varies:
            for operand in lines[k][1]:
                until[operand] = max(until[operand], stage[k])
        for line in trace.stores.values():
            until[line] = count - 1
        free = set(range(len(lines))) - varies
        of = [{k for k in varies if stage[k] == number} | free for number in range(count)]
        crossing = [[k for k in sorted(varies) if stage[k] <= number < until[k]] for number in range(count - 1)]
        return cls(of, crossing)


def used_before(trace: Trace, waits: set[int]) -> list[int]:
    """Return the instructions stored, summed, or searched for the largest word before that word is known."""
    wanted = [*trace.stores.values(), *(number for _, number in trace.sums)]
    found = [k for k in wanted if k not in waits]
    return found + [k for name, operands, _ in trace.lines if name == "block_largest" for k in operands]


def in_turns(trace: Trace) -> list[int]:
    """Return the instructions in the order in which their operands can be there."""
    ready: list[int] = []
    for name, operands, _ in trace.lines:
        ready.append(max((ready[k] for k in operands), default=0) + _LATENCY.get(name, 1))
    return sorted(range(len(ready)), key=lambda k: (ready[k] - _LATENCY.get(trace.lines[k][0], 1), k))


def with_operands(trace: Trace, lines: Iterable[int]) -> set[int]:
    """Return instructions and all that they are computed from, up to a block's largest words."""
    found, left = set(), list(lines)
    while left:
        k = left.pop()
        if k not in found:
            found.add(k)
            left += [] if trace.lines[k][0] == "block_largest" else trace.lines[k][1]
    return found
