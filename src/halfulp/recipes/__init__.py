"""Recipes: named, serializable choices that turn a float32 training into one in fewer bits."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
