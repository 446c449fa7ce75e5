"""Runs single-turn tasks without the library's runtime: render, sample, score.

A rollout of the library starts a runtime, a session and a harness. A task with only a prompt and
reward functions needs none of them. Here its response becomes a trace, and ``Task.score`` runs on
it. The rewards are the same, in a small part of the time.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
from typing import Any

import tinker
from verifiers.v1 import graph
from verifiers.v1.dialects.chat import message_to_wire, parse_message
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.state import state_cls
from verifiers.v1.task import Task
from verifiers.v1.trace import AgentInfo, ModelCall, Trace, TraceTask
from verifiers.v1.types import Response, SystemMessage, TurnTokens, Usage, UserMessage
from verifiers.v1.utils.decorators import discover_decorated

from tinker_cookbook.completers import StopCondition
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.recipes.verifiers_rl.messages import openai_fields, prompt_of
from tinker_cookbook.recipes.verifiers_rl.v1.traces import metrics_of
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import Action, ActionExtra, Env, StepResult, StopReason


def why_not_single_turn(env: Any, task: Any) -> str | None:
    """Returns why a task cannot use the direct path, or None if it can."""
    if type(env) is not SingleAgentEnv:
        return f"{type(env).__name__} has several agents or its own run()"
    if env.taskset.toolsets(env.taskset.config) or task.toolsets(task.config):
        return "it has tools"
    if task.NEEDS_CONTAINER or task.data.agent_user or task.data.artifacts or task.data.skills:
        return "it needs a container, files or skills"
    if task.data.prompt is None:
        return "a simulated user opens its conversation"
    for hook in ("setup", "finalize"):
        if getattr(type(task), hook) is not getattr(Task, hook):
            return f"it defines {hook}()"
    if task.hooks("stop") or discover_decorated(task, "intercept"):
        return "it has @stop or @intercept functions"
    judges = [judge.score for judge in task.plugged_judges()]
    for function in (*task.hooks("metric"), *task.hooks("reward"), *judges):
        runtime = inspect.signature(function).parameters.get("runtime")
        # A default means that the function also scores without one.
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            return f"{function.__name__} needs a runtime"
    return None


class SingleTurnEnv(Env):
    """One response to a task's prompt, scored by the task. ``trace`` is its trace at the end."""

    def __init__(self, task: Any, agent_config: Any, renderer: Renderer) -> None:
        self._task, self._agent_config, self._renderer = task, agent_config, renderer
        prompt, system = task.data.prompt, task.data.system_prompt
        messages = [UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt)
        self._messages = [*([SystemMessage(content=system)] if system else []), *messages]
        wire = [message_to_wire(message) for message in self._messages]
        self._ob = prompt_of(renderer, wire)
        self.trace: Any = None

    async def initial_observation(self) -> tuple[tinker.ModelInput, StopCondition]:
        """Returns the prompt."""
        return self._ob, self._renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Scores the response."""
        extra = extra or {}
        trace = self._trace_of(action, extra.get("logprobs") or [], extra.get("stop_reason"))
        await self._task.score(trace)
        trace.is_completed = trace.ok = True
        self.trace = trace
        return StepResult.final(
            float(trace.reward),
            self._renderer.get_stop_sequences(),
            metrics=metrics_of(trace),
            stop_reason=StopReason.COMPLETED,
        )

    def _trace_of(self, action: Action, logprobs: list[float], stop_reason: str | None) -> Any:
        """Returns the trace that a rollout of the library would have recorded."""
        task, prompt = self._task, self._ob.to_ints()
        if logprobs and len(logprobs) != len(action):
            raise DataValidationError(
                f"got {len(action)} tokens and {len(logprobs)} log-probabilities, expected one "
                "for each token"
            )
        trace: Any = Trace(
            task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=state_cls(type(task))(),
            agent=AgentInfo(config=self._agent_config),
        )
        message = parse_message(openai_fields(self._renderer.parse_response(action)[0]))
        usage = Usage(prompt_tokens=len(prompt), completion_tokens=len(action))
        finish = "length" if stop_reason == "length" else "stop"
        spans: list[tuple[int, int] | None] = [None] * len(self._messages)
        spans[-1] = (0, len(prompt))
        tokens = TurnTokens(
            prompt_ids=prompt, completion_ids=action, completion_logprobs=logprobs,
            message_spans=spans,
        )  # fmt: skip
        turn = graph.prepare_turn(trace, self._messages, [])
        node = turn.commit(
            Response(
                id=trace.id,
                created=0,
                model="policy",
                message=message,
                finish_reason=finish,
                usage=usage,
                tokens=tokens,
            )
        )
        call = ModelCall(node=node, model="policy", finish_reason=finish, usage=usage)
        trace.calls.append(call)
        trace.stop("agent_completed")
        return trace
