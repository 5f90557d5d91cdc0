"""Recipes: named, serializable choices that turn a float32 training into one in fewer bits."""

from ._apply import RULES as RULES
from ._apply import apply as apply
from ._apply import assign as assign
from ._apply import scaler as scaler
from ._catalog import get as get
from ._catalog import names as names
from ._near import unknown as unknown
from ._recipe import Recipe as Recipe
from ._verify import Verification as Verification
from ._verify import verify as verify
