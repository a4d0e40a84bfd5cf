"""Changes what the workers of an engine do, from outside: slower steps, held starts, own code.

Every Python runs the module `sitecustomize` that it finds in PYTHONPATH before anything else. Ours
changes workers alone, and those only once they import their executor.
"""

from __future__ import annotations

from pathlib import Path

_SITE = """
import sys

if "worker" in sys.orig_argv:
    import importlib.abc, importlib.machinery, os, time

    folder = os.path.dirname(__file__)
    classes = {
        "engine.executor.cpu": "CpuExecutor",
        "engine.executor.reference": "ReferenceExecutor",
    }

    def content(name):
        with open(os.path.join(folder, name)) as file:
            return file.read()

    def patch(executor):
        forward = executor.forward

        def slow(self, chunks):
            started = time.monotonic()
            # In slices: what is slow no longer goes on at once.
            while (rest := started + float(content("step_s")) - time.monotonic()) > 0:
                time.sleep(min(rest, 0.02))
            return forward(self, chunks)

        executor.forward = slow
        exec(content("patch"), {"Executor": executor})

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name not in classes:
                return None
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            run = spec.loader.exec_module

            def run_and_patch(module):
                while os.path.exists(os.path.join(folder, "held")):
                    time.sleep(0.01)
                run(module)
                patch(getattr(module, classes[name]))

            spec.loader.exec_module = run_and_patch
            return spec

    sys.meta_path.insert(0, Finder())
"""


class PatchedWorkers:
    """A folder for PYTHONPATH. What it says holds for all workers that have it there, at once.

    `patch` is Python that each of them runs, with its class of executors as `Executor`.
    """

    def __init__(self, folder: Path, step_s: float, patch: str) -> None:
        folder.mkdir()
        self.folder = folder
        self.step_s = step_s
        (folder / "patch").write_text(patch)
        (folder / "sitecustomize.py").write_text(_SITE)

    @property
    def step_s(self) -> float:
        """Every step takes that much longer."""
        return float((self.folder / "step_s").read_text())

    @step_s.setter
    def step_s(self, seconds: float) -> None:
        new = self.folder / "step_s.new"
        new.write_text(str(seconds))
        new.rename(self.folder / "step_s")

    def hold(self) -> None:
        """No worker gets ready, until `release`."""
        (self.folder / "held").touch()

    def release(self) -> None:
        (self.folder / "held").unlink()
