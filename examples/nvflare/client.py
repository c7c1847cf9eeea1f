"""The client: a script of NVFlare's Client API. `ClientFilter` clips what it sends, and keeps the metrics here."""

import nvflare.client as flare

from training import network, train

flare.init()
while flare.is_running():
    received = flare.receive()
    model = network()
    model.load_state_dict(received.params)
    loss = train(model, flare.get_site_name())
    flare.send(flare.FLModel(params=model.state_dict(), metrics={"loss": loss}))
