"""Makes the job and runs it in NVFlare's simulator: python job.py FOLDER. To submit it instead, call export_job."""

import sys

from nvflare.job_config.api import FedJob
from nvflare.job_config.defs import FilterType
from nvflare.job_config.script_runner import ScriptRunner

from anyorder.federated.nvflare import ClientFilter, PrivateController

job = FedJob("private", min_clients=1)
job.set_app_packages(["anyorder"])  # installed everywhere, and not sent with the job
job.to_server(PrivateController(server="training:make_server", timeout=600.0))
job.to_server("training.py")
job.to_clients(ScriptRunner(script="client.py", launch_external_process=True), tasks=["train"])
job.to_clients("training.py")
job.to_clients(ClientFilter(), tasks=["train"], filter_type=FilterType.TASK_RESULT)
job.simulator_run(sys.argv[1], n_clients=4, threads=4)
