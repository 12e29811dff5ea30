"""`python -m zsim` and the `zsim` console script."""

from zsim.cli.app import main

if __name__ == "__main__":
    main()
