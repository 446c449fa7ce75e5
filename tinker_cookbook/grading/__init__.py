"""Graders of answers, one for each type, for rewards and evaluations alike.

``numbers`` reads the number of a response, ``mathematics`` compares expressions, ``letters`` finds
a choice, ``texts`` finds the answer itself. ``sandbox.PythonGrader`` grades programs.
"""
