"""Further questions in a running console: the text that is spliced in between two rollouts of a conversation."""

from repl_rl.errors import ConfigError
from repl_rl.record.console import PS1
from repl_rl.record.trajectory import Prompt
from repl_rl.rollout import Rollouts
from repl_rl.rollout.conversation import Conversation
from repl_rl.rollout.prompts import start
from repl_rl.rollout.renderer import Renderer
from repl_rl.rollout.sampler import ReplSampler, RolloutSampler
from repl_rl.samplers.chat import ChatFormat
from repl_rl.tasks import Task


def refuse_single(sampler: RolloutSampler) -> None:
    """Reject a sampler whose rollouts cannot follow each other in one console.

    Raises:
        ConfigError: it is not the line console, or begins with thinking.
    """
    if not isinstance(sampler, ReplSampler) or sampler.thinking:
        remedy = "only rollouts of the line console (repl, without thinking) follow each other in one console"
        raise ConfigError("sampler", type(sampler).__name__, remedy)


def prompt_in(conversation: Conversation, rollouts: Rollouts, task: Task) -> Prompt:
    """Return the prompt of the next turn of a conversation: the conversation so far, then the prompt of `task`.

    Raises:
        ConfigError: as `further`.
    """
    if not conversation.token_ids:
        return rollouts.prompt(task)
    version = ".".join(map(str, rollouts.sandbox.python_version))
    so_far = Prompt(conversation.text, conversation.token_ids)
    more = further(rollouts.renderer, rollouts.template, task.question, version, so_far)
    return conversation.after(more)


def further(renderer: Renderer, template: str, question: str, version: str, so_far: Prompt) -> Prompt:
    """Return the text between `so_far`, the end of a rollout in the line console, and the first line of the next one.

    A plain template is repeated with the new question, without the banner, because the console already runs. In a chat,
    the policy's turn is ended if the policy has not ended it. The question is the next user message.

    Args:
        renderer: of the policy.
        template: the prompt template of the first question, see `Renderer.prompt`.
        question: the next one.
        version: of the Python in the sandbox.
        so_far: everything before.

    Raises:
        ConfigError: the chat template cannot write such a message.
    """
    begun = start(template, question, version)
    asked = PS1 if begun.console.endswith(PS1) else ""
    if begun.system is None:
        between = "" if so_far.text.endswith("\n") else "\n"
        text = between + begun.head + asked
        return Prompt(text, renderer.splice(text))
    message = {"role": "user", "content": begun.question}
    # The limit exceeds the question's length, so the question is never truncated.
    glue = ChatFormat(renderer).reply([message], len(renderer.encode(begun.question)) + 1)
    # The glue begins behind an end token. Add one if the policy has not written it.
    ended = so_far.token_ids[-1] in renderer.eos_ids
    end = () if ended else (renderer.end_id,)
    return Prompt(glue.text + asked, (*end, *glue.token_ids, *renderer.splice(asked)))
