"""Numba's compiler for kernels and their pieces: code is optimized once, in the kernel, and nothing else is assembled.

By itself Numba optimizes each function alone, makes machine code of it, and does both again in every caller that it is
inlined into; and it looks for closures, contexts and array expressions, which no kernel has.
"""

from __future__ import annotations

from llvmlite.binding import Linkage
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import LoweringPass, PassManager, register_pass
from numba.core.typed_passes import (
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.untyped_passes import FixupArgs, IRProcessing, ReconstructSSA, TranslateByteCode


class _Kernel(JITCodeLibrary):
    """A code library that is optimized as a whole."""

    def _optimize_functions(self, ll_module) -> None:
        ll_module.data_layout = self._codegen._data_layout


class _Piece(_Kernel):
    """A code library that is linked into kernels."""

    def finalize(self) -> None:
        """Link all callees in; a kernel may reach this library by several paths."""
        module = self._shared_module = self._final_module
        for library in dict.fromkeys(self._linking_libraries):
            module.link_in(library._get_module_for_linking(), preserve=True)
        for function in module.functions:
            if not function.is_declaration and function.linkage == Linkage.external:
                function.linkage = "linkonce_odr"
        self._finalized = True


@register_pass(mutates_CFG=False, analysis_only=False)
class _Known(LoweringPass):
    """Declarations by which device functions compiled earlier may be called."""

    _name = "halfulp_known_piece"

    def __init__(self) -> None:
        LoweringPass.__init__(self)

    def run_pass(self, state) -> bool:
        # Numba knows a function by what Python would call; it demands a built-in one, and no two are equal.
        nothing: list[object] = []
        stand_in = nothing.append
        state.cr = state.cr._replace(cfunc=stand_in)
        state.targetctx.insert_user_function(stand_in, state.cr.fndesc, [state.library])
        return True


class KernelCompiler(CompilerBase):
    """The compiler of kernels."""

    library: type[_Kernel] = _Kernel
    passes: tuple[type, ...] = (
        TranslateByteCode,
        FixupArgs,
        IRProcessing,
        ReconstructSSA,
        NopythonTypeInference,
        PreLowerStripPhis,
        IRLegalization,
        NativeLowering,
        NoPythonBackend,
    )

    def define_pipelines(self) -> list[PassManager]:
        """Return the passes of the compilation (called by Numba)."""
        state = self.state
        state.library = self.library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        manager = PassManager("halfulp")
        for step in self.passes:
            manager.add_pass(step, step.__name__)
        manager.finalize()
        return [manager]


class PieceCompiler(KernelCompiler):
    """The compiler of device functions: no machine code is emitted."""

    library = _Piece
    passes = (*KernelCompiler.passes[:-1], _Known, NoPythonBackend)

    def define_pipelines(self) -> list[PassManager]:
        """Return the passes, with the flag that stops lowering before machine code."""
        self.state.flags.no_compile = True
        return super().define_pipelines()
