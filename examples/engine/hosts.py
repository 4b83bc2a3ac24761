"""Entry point of the demo on two hosts: `PYTHONPATH=examples python -m engine.hosts`, as root."""

from .ending import run

if __name__ == "__main__":
    run("two_hosts")
