"""Recipes: named, serializable choices that turn a float32 training into one in fewer bits."""

from ._contract import Contract as Contract
from ._contract import contract as contract
from ._convert import convert as convert
from ._convert import revert as revert
from ._multipoint import Multipoint as Multipoint
from ._multipoint import MultipointLayer as MultipointLayer
from ._multipoint import multipoint as multipoint
from ._optimizer import optimizer as optimizer
from ._optimizer import scaler as scaler
from ._plan import Explanation as Explanation
from ._plan import assign_weight_updates as assign_weight_updates
from ._plan import explain as explain
from ._recipe import Recipe as Recipe
from ._recipe import get as get
from ._recipe import names as names
from ._recipe import register as register
from ._verify import Verification as Verification
from ._verify import verify as verify
