"""`python -m anybatch` is the command `anybatch`."""

from anybatch.app.cli.main import main

if __name__ == "__main__":
    main()
