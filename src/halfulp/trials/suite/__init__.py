"""The papers' suite: their kinds of tasks under every recipe, their figures and findings beside ours."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
