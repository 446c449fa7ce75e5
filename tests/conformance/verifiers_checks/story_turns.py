"""Environment of verifiers 0.4 with several turns: the environment itself speaks in between."""

from __future__ import annotations

import story_letters
import verifiers.v1 as vf


class TurnsTask(story_letters.LetterTask):
    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class StoryTurns(vf.Taskset[TurnsTask, story_letters.LetterConfig]):
    def load(self):
        for start in story_letters.STARTS:
            yield TurnsTask(story_letters.LetterData(prompt=start, letter=self.config.letter))


class TurnsConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    listener: vf.AgentConfig = vf.AgentConfig()
    fail: bool = False


class TurnsEnv(vf.Env[TurnsConfig]):
    """Two more turns of the agent, each after words of a second agent that is not trained."""

    async def setup(self, agents) -> None:
        agents.listener.trainable = False

    async def run(self, task, agents) -> None:
        if self.config.fail:
            raise RuntimeError("the world is broken")
        async with agents.agent.interaction(task) as talk:
            await talk.turn()
            for _ in range(2):
                heard = await agents.listener.run(task.with_data(prompt="Say something."))
                await talk.turn(heard.last_reply or "Go on.")


__all__ = ["StoryTurns", "TurnsEnv"]
