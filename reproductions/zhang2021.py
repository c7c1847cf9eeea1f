"""Zhang, Mironov and Hejazinia 2021, "Wide network learning with differential privacy"."""

from reproductions._claims import Figure
from reproductions.zhang import experiment, privacy

TITLE = "Zhang, Mironov and Hejazinia 2021, Wide network learning with differential privacy"

FIGURES = (
    Figure("lemmas", privacy.lemmas),
    Figure("algorithm1", privacy.sparse_vector),
    Figure("algorithm2", privacy.theorem1),
    Figure("algorithm4", privacy.algorithm4),
    Figure("theorem3", privacy.theorem3),
    Figure("figure1", experiment.figure1),
    Figure("table2", experiment.table2),
)
