"""Run the command line with `python -m ecrl`."""

from ecrl.cli.main import main

if __name__ == "__main__":
    main()
