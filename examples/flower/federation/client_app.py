"""The client: Flower's usual train function; the mod lets one clipped change out, and neither metrics nor buffers."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from anyorder.federated.flower import client_mod
from federation.task import EXAMPLES, network, train

app = ClientApp(mods=[client_mod(user=lambda context: str(context.node_config["user"]))])


@app.train()
def fit(message: Message, context: Context) -> Message:
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)  # buffers are the device's own
    loss = train(model, str(context.node_config["user"]), float(message.content["config"]["lr"]))
    metrics = MetricRecord({"train_loss": loss, "num-examples": EXAMPLES})  # the mod keeps these here
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
