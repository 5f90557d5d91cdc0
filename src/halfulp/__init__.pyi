"""Train in 16, 8 and fewer bits with 32-bit accuracy, and see why it works."""

from . import arithmetic as arithmetic
from . import formats as formats
from . import gradients as gradients
from . import hyperbolic as hyperbolic
from . import kernels as kernels
from . import optim as optim
from . import recipes as recipes
from . import rounding as rounding
from . import scaled as scaled
from . import tensors as tensors
from . import testing as testing
from . import trials as trials
from .arithmetic import exact_dot as exact_dot
from .arithmetic import exact_partial as exact_partial
from .arithmetic import exact_round as exact_round
from .arithmetic import exact_sum as exact_sum
from .emulate import emulate as emulate
from .formats import BlockFormat as BlockFormat
from .formats import Format as Format
from .gradients import AdaptiveGradScaler as AdaptiveGradScaler
from .optim import Components as Components
from .optim import Feedback as Feedback
from .optim import Kahan as Kahan
from .optim import Master as Master
from .optim import Split as Split
from .optim import float32_gradients as float32_gradients
from .recipes import Recipe as Recipe
from .recipes import verify as verify
from .rounding import Down as Down
from .rounding import Nearest as Nearest
from .rounding import Stochastic as Stochastic
from .rounding import TowardZero as TowardZero
from .rounding import Up as Up
from .rounding import quantize as quantize
from .scaled import ScaledTensor as ScaledTensor
from .scaled import cast as cast
from .scaled import rescale as rescale
from .scaled import scalify as scalify
from .tensors import MCTensor as MCTensor
from .tensors import fallbacks as fallbacks
from .tensors import multicomponent as multicomponent
from .trials import Evidence as Evidence
from .trials import compare as compare

__version__: str
