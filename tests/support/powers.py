"""A loop whose values are known: powers of a factor."""


def powers(loop, factor, start, xs):
    return loop(lambda carry, x: (carry * factor + x, carry * 1.0), start, xs)
