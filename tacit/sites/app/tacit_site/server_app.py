"""On the server: runs tacit's own rounds over Flower's grid."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    from tacit.sites.server import run_job

    run_job(str(context.run_config["job"]), grid)
