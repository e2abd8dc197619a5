"""`python -m ecrl`: the command line."""

from ecrl.cli.main import main

if __name__ == "__main__":
    main()
