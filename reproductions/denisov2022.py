"""Denisov et al. 2022, "Improved DP for SGD via optimal private linear operators on adaptive streams".

Fig. 2 of the text at hand has no caption and is not named in it: what it can have shown is one of the two pictures of
the four mechanisms' errors (Fig. 1 names both, prefix sums and momentum) or the one of accuracies (Fig. 3).
"""

from reproductions._claims import Figure
from reproductions.denisov import brown, errors, fixed_point, privacy

TITLE = "Denisov et al. 2022, Improved DP for SGD via optimal private linear operators on adaptive streams"

FIGURES = (
    Figure("adaptive", privacy.adaptive),
    Figure("theorem32", fixed_point.theorem32),
    Figure("theorem33", fixed_point.theorem33),
    Figure("identities", privacy.identities),
    Figure("figure1", errors.figure1),
    Figure("figure2", errors.momentum1),
    Figure("figure3", brown.figure3, trains=True),
    Figure("epsilons", privacy.epsilons),
    Figure("figure4", fixed_point.figure4),
    Figure("table2", errors.table2),
)
