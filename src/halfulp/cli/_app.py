"""The typer application of all commands, and its entry point."""

import sys
from typing import Annotated, Any, NoReturn

from .._extensions import load_extensions, load_inherited_extensions
from ._errors import discard_output, escape_unencodable_letters, exit_with_error

# What typer makes of a KeyboardInterrupt; older ones raise Abort.
_INTERRUPTED_EXIT_CODE = 130


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit; a mistake of the user, or Ctrl-C, is one line on stderr and exit code 2."""
    escape_unencodable_letters()
    try:
        code = make_application()(arguments, prog_name="halfulp", standalone_mode=False)
    except KeyboardInterrupt:
        code = _INTERRUPTED_EXIT_CODE
    except (ValueError, NotImplementedError, ImportError) as error:
        exit_with_error(error)
    except OSError as error:
        discard_output()
        exit_with_error(error)
    except Exception as error:
        if type(error).__name__ == "Abort":
            exit_with_error("interrupted")
        if not hasattr(error, "format_message"):
            raise
        exit_with_error(f"{error.format_message().rstrip('.')}; see halfulp --help")
    if code == _INTERRUPTED_EXIT_CODE:
        exit_with_error("interrupted")
    sys.exit(code if isinstance(code, int) else 0)


def make_application() -> Any:
    """Return the typer application; a command imports what is slow where it runs, so that its help does not."""
    try:
        import rich  # noqa: F401
        import typer
    except ImportError as error:
        exit_with_error(
            f"the command line needs {error.name}: pip install 'halfulp[cli]'; halfulp.environment."
            "describe_environment() tells without it what halfulp env prints"
        )

    from ._compare import compare, tune
    from ._instruments import OBSERVE_CONTEXT_SETTINGS, audit, forecast, observe, verify
    from ._listings import env, formats, recipes, tasks
    from ._warm import warm

    app = typer.Typer(
        help="Train in 16, 8 and fewer bits with 32-bit accuracy, and see why it works.",
        pretty_exceptions_enable=False,
    )

    @app.callback(invoke_without_command=True)
    def main_options(
        context: typer.Context,
        version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
        extension: Annotated[
            list[str] | None,
            typer.Option(
                help="A file or module that registers formats, recipes, optimizers, policies or tasks; several: "
                "one option each.",
            ),
        ] = None,
    ) -> None:
        load_inherited_extensions()
        load_extensions(extension or [])
        if version:
            from .. import __version__

            print(f"halfulp {__version__}")
        elif context.invoked_subcommand is None:
            print(context.get_help())

    for command in (compare, tune, verify, audit, forecast, formats, recipes, tasks, env, warm):
        app.command()(command)
    app.command(context_settings=OBSERVE_CONTEXT_SETTINGS)(observe)
    return app
