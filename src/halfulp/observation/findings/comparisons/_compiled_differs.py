"""compiled-differs: a compiled module that rounds otherwise than its eager original."""

from collections.abc import Iterator

from ..._finding import Finding
from ..._words import percent
from ...record._record import Record
from .._kind import FindingKind, register_finding
from .._same_outputs import explained_by_order


@register_finding
class CompiledDiffers(FindingKind):
    """A compiled module gives other values than eager: the compiler left out a cast that the code has."""

    code = "compiled-differs"
    cure = (
        'torch.compile(model, options={"emulate_precision_casts": True}); hu.quantize and hu.emulate are operators '
        "that no compiler leaves out"
    )
    role = "activation"
    worst = "relative"

    def in_record(self, record: Record) -> Iterator[Finding]:
        for pair in record.compiled:
            if pair.differing and not explained_by_order(pair):
                yield self.found(
                    pair.name,
                    "warning",
                    1.0,
                    f"{percent(pair.differing)} of outputs in {pair.dtypes[1]} differ from eager, by "
                    f"{percent(pair.relative)} of their size",
                    differing=pair.differing,
                    relative=pair.relative,
                )
