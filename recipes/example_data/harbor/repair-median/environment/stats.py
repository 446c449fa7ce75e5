"""Statistics of lists."""


def median(values):
    values.sort()
    return values[len(values) // 2]


def mean(values):
    return sum(values) / len(values)
