"""`python -m conure`: the command line, the same as the `conure` script."""

from conure.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
