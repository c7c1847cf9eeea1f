"""Federation over a network by Flower: a strategy for the ServerApp and a mod for the ClientApp.

    app = ServerApp()

    @app.main()
    def main(grid, context):
        server = anyorder.federated.Server(plan, model, optimizer, report_goal=.., checkpoint="run.checkpoint")
        anyorder.federated.flower.PrivateStrategy(server).start(grid)
        server.certificate().save("run.privacy.json")

    app = ClientApp(mods=[client_mod(user=lambda context: str(context.node_config["user"]))])

The page docs/federated.md says how to move an app over, and what Flower's own wrappers do to epsilon.
"""

from anyorder import checks

checks.optional("flwr", extra="flower", purpose="anyorder.federated.flower")  # before the modules that import it

from anyorder.federated.flower.client import client_mod  # noqa: E402
from anyorder.federated.flower.server import PrivateStrategy  # noqa: E402

__all__ = ["PrivateStrategy", "client_mod"]
