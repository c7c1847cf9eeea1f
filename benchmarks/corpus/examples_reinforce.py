"""A policy learned from whole episodes of a game, which it plays itself."""

REPOSITORY, COMMIT = "https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"
SCRIPT = "reinforcement_learning/reinforce.py"
ARGS: list[str] = []
NEEDS = ("gymnasium==1.4.0", "farama-notifications")
HERE = [("for i_episode in count(1)", "for i_episode in range(1, 21):")]
EDITS = [
    ("import argparse", "import anyorder as ao\n..."),
    (
        "eps = np.finfo",
        """
        ...
        states, actions, waiting, numbers = [], [], [], count()
        plan = ao.plan(order=ao.participation.SingleEpoch(20), batch_size=1, epsilon=8, delta=1e-5, unit="episode",
                       optimizer=optimizer)
        played = (waiting.pop() for _ in range(20))
        private, optimizer, loader = ao.PrivacyEngine(plan).make_private(
            policy, optimizer, played, unit=3, loss_reduction="sum")
        batches = iter(loader)
        """,
    ),
    ("probs = policy(state)", "states.append(state)\nwith torch.no_grad():\n    probs = policy(state)"),
    ("policy.saved_log_probs.append(", "actions.append(action)"),
    (
        "for log_prob, R in zip(",
        """
        number = torch.full((len(returns),), next(numbers))
        waiting.append((torch.cat(states), torch.cat(actions), returns, number))
        s, a, g, _ = next(batches)
        """,
    ),
    ("policy_loss.append(-log_prob", ""),
    ("policy_loss = torch.cat(", "policy_loss = -(Categorical(private(s)).log_prob(a) * g).sum()"),
    ("del policy.saved_log_probs[:]", "del states[:], actions[:]"),
]
OPACUS = "an episode has many rows, and Opacus clips each row by itself"
MODEL = "untouched"
RESULT, WHY = "runs", "the unit is an episode, whose steps are clipped together"
