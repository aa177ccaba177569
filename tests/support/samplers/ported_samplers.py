"""Five things that others' users wrote, as a user would write them here; `test_ports.py` counts their lines."""

import re

from repl_rl import Episode, Exchange, Feedback, FeedbackSampler, RewardTable, RolloutSampler, Task
from repl_rl.integrations.gym_environment_sampler import EnvironmentSampler
from repl_rl.samplers.chat_tool_sampler import ChatToolSampler, JudgeToolSampler
from repl_rl.samplers.inline_call_sampler import parse_call
from repl_rl.samplers.tool_call_parsing import Toolbox
from repl_rl.trajectory.trajectory import Execution

JUDGES = "tests.support.samplers.ported_judges"


# What their policies may call is not counted.
def where(city: str) -> str:
    return {"Paris": "sunny"}[city]


def run_sql(query: str) -> str:
    """Run a query.

    Args:
        query: In SQL.
    """
    return "7" if "COUNT" in query else "no such table"


# A. TRL's issue 2723: a penalty of -0.3 for an error, calls in running text, a user who answers in the middle.
PENALTIES = RewardTable(syntax_error=-0.3, exception=-0.3)
CALL = r"<fn>(.*?)</fn>"
TOOLS = Toolbox([where])


class AsksBack(RolloutSampler):
    async def rollout(self, episode: Episode) -> None:
        while not episode.ended:
            line = await episode.sample(until=rf"{CALL}|\?|<answer>.*?</answer>")
            if call := re.search(CALL, line.text):
                result = await TOOLS.run(parse_call(call[1]))
                episode.record_execution(Execution(result.status, result.elapsed_s))
                episode.observe(f"<fn_results>{result.text}</fn_results>")
            elif answer := re.search(r"<answer>(.*?)</answer>", line.text):
                episode.submit(answer[1])
            elif not episode.ended:
                episode.observe(" I am in Paris.\n")


# B. TRL's example of an SQL agent: one tool, three reward functions over messages and columns, on their own scales.
SQL = ChatToolSampler([run_sql])
SQL_JUDGES = dict.fromkeys(("task", f"{JUDGES}:queried", f"{JUDGES}:structured", f"{JUDGES}:correct"), 1.0)

# C. AReaL's multi-turn agent, which discounts the outcome by turns; and an environment with rewards of its own scale.
RETRIES = FeedbackSampler(max_assistant_turns=3, discount=0.9)


class Chest:
    def __init__(self, task: Task) -> None:
        self.coins = float(str(task.fields["coins"]))

    def reset(self) -> str:
        return "Open?"

    def step(self, action: object) -> tuple[str, float, bool, dict[str, object]]:
        return "", self.coins if action == "yes" else 0.0, True, {}


CHESTS = EnvironmentSampler(Chest, chat=False)


# D. verl's Gsm8kInteraction: a reward for each turn, and the user says what to do next.
async def interaction(exchange: Exchange) -> Feedback:
    if exchange.score >= 1.0:
        return Feedback("Your response is correct!", reward=1.0, done=True)
    return Feedback("Your response is incorrect! You need to reflect on your answer and try again.", reward=-0.25)


GSM8K = FeedbackSampler(interaction, max_assistant_turns=5)


# E. XTuner's GSM8K with a tool that grades, and a judge that reads the row's other fields.
GRADED = JudgeToolSampler(checks=2)
GRADED_JUDGE = {"task": 0.0, f"{JUDGES}:by_source": 1.0}
