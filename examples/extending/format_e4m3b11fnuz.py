"""A format of one's own: four exponent bits with a bias of 11, known by its name to whatever takes a format's name."""

import halfulp as hu

e4m3b11fnuz = hu.formats.register(
    hu.Format("e4m3b11fnuz", exponent_bits=4, mantissa_bits=3, bias=11, infinities=False, nan="negative_zero")
)
hu.recipes.register(
    hu.Recipe(
        name="gradients-e4m3b11fnuz",
        description="float32 but for gradients in e4m3b11fnuz, a scale per layer",
        gradient_format="e4m3b11fnuz",
        gradient_scale="amax",
    )
)
