"""Recipes: named, serializable choices that turn a float32 training into one in fewer bits."""

from ._catalog import get as get
from ._catalog import names as names
from ._catalog import register as register
from ._contract import Contract as Contract
from ._contract import contract as contract
from ._convert import convert as convert
from ._convert import revert as revert
from ._explanation import Explanation as Explanation
from ._explanation import explain as explain
from ._optimizer import optimizer as optimizer
from ._optimizer import scaler as scaler
from ._plan import assign as assign
from ._recipe import Recipe as Recipe
from .verification._verify import Verification as Verification
from .verification._verify import verify as verify
