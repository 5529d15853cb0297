"""The command line, `sdsage`."""


def main() -> None:
    """Entry point."""
    import io
    import sys

    try:
        from .app import build_app

        if isinstance(sys.stdout, io.TextIOWrapper):
            encoding = "utf-8" if sys.platform == "win32" else None  # a pipe there has the code page of the system
            sys.stdout.reconfigure(encoding=encoding, errors="surrogateescape")  # file names go out as they came in
        verb = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        build_app(only=verb)(prog_name="sdsage")
    except KeyboardInterrupt:  # outside a verb, which has its own answer
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
