"""What `warmup` sends: the plan of the installed engine, and the prompts of a plan."""

from __future__ import annotations

import argparse
from importlib.metadata import entry_points
from pathlib import Path

from google.protobuf.message import DecodeError

from cachewarmd import plan, prompt_list
from cachewarmd.ctl.outcome import UsageError
from cachewarmd.errors import CachewarmError, InvalidRequestError, ModelFilesError
from cachewarmd.v1 import control_pb2 as pb

PLAN_GROUP = "cachewarm.pack_plan"


def pack_plan(model_dir: Path) -> pb.PackPlan:
    """The plan that the installed engine makes for this model.

    Found by entry point: this package must not know the engine.
    """
    found = list(entry_points(group=PLAN_GROUP, name="default"))
    if not found:
        raise CachewarmError(
            "no engine is installed here that could say how to lay out the weights "
            f"(entry point {PLAN_GROUP}: default)"
        )
    try:
        plan_for = found[0].load()
    except (ImportError, AttributeError) as exc:
        raise CachewarmError(f"the engine's {found[0].value} can't be loaded: {exc}") from exc
    try:
        return pb.PackPlan.FromString(plan_for(model_dir))
    except DecodeError as exc:
        raise CachewarmError(f"{found[0].value} gave no pack plan") from exc
    except ValueError as exc:
        raise ModelFilesError(str(exc)) from exc


def prompts(args: argparse.Namespace) -> list[pb.WarmPrompt]:
    """Of the plan and of the command line, which says what items leave open. Raises UsageError."""
    if args.weights_only:
        return []
    found: list[pb.WarmPrompt] = []
    path = args.plan or args.prompts
    if path is not None:
        try:
            found += plan.load(path).prompts
        except InvalidRequestError as exc:
            raise UsageError(str(exc)) from exc
    for length in args.shapes:
        shape = pb.Shape(length=length, iterations=args.iterations)
        found.append(pb.WarmPrompt(shape=shape, name=f"shape-{length}"))
    if args.ttl is not None and not args.pin:
        raise UsageError("--ttl: only with --pin")
    for prompt in found:
        prompt.urgency = prompt.urgency or plan.URGENCIES[args.urgency]
        if args.pin and not prompt.pin and not prompt.HasField("shape"):
            prompt.pin = True
            prompt.ttl_ms = round(1000 * (args.ttl or 0))
    return found


def build(args: argparse.Namespace, found: list[pb.WarmPrompt]) -> tuple[pb.Envelope, list[int]]:
    """The whole request, and what goes with it behind the directory: see `prompt_list.put`."""
    if not args.model.is_dir():
        raise ModelFilesError(f"{args.model}: no such model directory")
    request = pb.Warmup(
        model_name=args.model_name or args.model.resolve().name,
        version=args.model_version,
        plan=pack_plan(args.model),
        key=args.key,
        if_version=args.if_version,
        stall_timeout_ms=round(1000 * args.stall_timeout),
        max_parallel=args.jobs,
    )
    fds = prompt_list.put(request, found)
    return pb.Envelope(warmup=request), fds
