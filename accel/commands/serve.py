"""`accel serve`: transformers' own server, with optimized models."""

import typer

EXTRA = "pip install 'hf-accel[serve]'"
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def serve(ctx: typer.Context) -> None:
    """Serve a model with transformers' own server, optimized. Takes what `transformers serve` takes.

    Such as: accel serve FOLDER_OR_NAME --continuous-batching --port 8000. Every model that the server loads is
    optimized; with --continuous-batching each request is drawn by its own settings.
    """
    from accel.libraries.versions import can_serve

    if not can_serve():
        typer.echo(f"accel serve needs the packages of transformers' server: {EXTRA}", err=True)
        raise typer.Exit(1)
    from accel.commands.serving import optimized_serving
    from accel.libraries.server import Serve

    server = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    server.command()(Serve)
    with optimized_serving():
        typer.main.get_command(server).main(ctx.args, prog_name="accel serve")
