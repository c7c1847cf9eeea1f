"""What was not tried, and why."""

from collections.abc import Iterator

from reproductions._claims import Claim, Run

CLAIMS = (
    (
        "Figure 1, EMNIST",
        "EMNIST: the same order of the mechanisms as on MNIST and CIFAR-10",
        "Figure 1(c)",
        "The data set is not at hand, and 6975 steps of batch 500 and 2000 are hours on one core; its noise is above.",
    ),
    (
        "Figure 2(b)",
        "Stack Overflow: the largest noise that reaches 24.5 % is 0.007 for DP-SGDM and 0.149 for DP-FTRLM",
        "0.007, 0.149",
        (
            "342 477 users, 4 million weights and 1600 rounds are a day a point on one core; on Brown no run reaches"
            " such an accuracy."
        ),
    ),
    (
        "Figures 3(d) to (f) and 4(d), (e)",
        "Momentum after 20 to 200 epochs",
        "DP-SGD better without on CIFAR-10, DP-FTRL with",
        "Four to forty times the steps of the top rows, on the paper's networks: days on one core.",
    ),
    (
        "Figure 6, EMNIST; Figure 8, EMNIST",
        "EMNIST: better estimator and completion help",
        "always",
        "See Figure 1, EMNIST.",
    ),
    (
        "Figure 9(b)",
        "EMNIST, 50 epochs: restarts every 5 epochs, completed, pass amplified DP-SGD from epsilon 5",
        "epsilon 5",
        "69 750 steps a run; its noise is above.",
    ),
    (
        "Table 4",
        "Stack Overflow: test accuracies of DP-SGDM and DP-FTRLM, 17 to 21 %",
        "16.52 to 21.33 %",
        "The data set's size; on Brown, above, their order is undecided.",
    ),
    (
        "Figures 11 and 12",
        "Stack Overflow: training curves by clip norm, and at 100 and 1000 users a round",
        "24.5 to 25.2 %",
        "The data set's size, and a thousand users a round are more than Brown has in five rounds.",
    ),
)


def missing(run: Run) -> Iterator[Claim]:
    """All of them."""
    for place, statement, theirs, why in CLAIMS:
        yield Claim(place=place, statement=statement, theirs=theirs, verdict="not tried", why=why)
