"""The demo's entry point: `PYTHONPATH=examples python -m engine --help`."""

from .ending import run

if __name__ == "__main__":
    run("demo")
