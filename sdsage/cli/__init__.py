"""The command line, `sdsage`."""


def main() -> None:
    """Entry point."""
    import io
    import sys

    try:
        from .app import build_app

        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="surrogateescape")  # file names go out as the bytes they came in
        verb = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        build_app(only=verb)(prog_name="sdsage")
    except KeyboardInterrupt:  # outside a verb, which has its own answer
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
