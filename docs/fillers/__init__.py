"""What fills the places of the pages: small functions, each named like its place, in files by subject."""

from . import architecture as architecture
from . import benchmarks as benchmarks
from . import comparisons as comparisons
from . import gpu as gpu
from . import gradients as gradients
from . import library as library
from . import mctensor as mctensor
from . import observation as observation
from . import optimizers as optimizers
from . import peers as peers
from . import products as products
from . import scaled as scaled
from . import verification as verification
from ._places import PLACES as PLACES
