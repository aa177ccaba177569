"""What a Jupyter client may ask of our kernel beside running a cell, and what a cell may ask of its client."""

import sys
from collections.abc import Iterator

import pytest

from tests.support.sandbox.kernel_client import TIMEOUT_S, Client, Content, installed, started


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with installed(tmp_path_factory.mktemp("jupyter"), isolated=False), started() as client:
        yield client


def test_user_expressions_are_evaluated_after_the_cell(kernel: Client) -> None:
    ran = kernel.run("y = 4", user_expressions={"square": "y * y", "wrong": "y / 0", "none": "z = 1"})
    values = ran.reply["user_expressions"]
    assert isinstance(values, dict)
    assert values["square"] == {"status": "ok", "data": {"text/plain": "16"}, "metadata": {}}
    assert [values[name]["ename"] for name in ("wrong", "none")] == ["ZeroDivisionError", "SyntaxError"]
    assert ran.outputs == []
    assert kernel.run("1/0", user_expressions={"a": "1"}).reply["user_expressions"] == {}


def test_input_asks_the_client(kernel: Client) -> None:
    waiting = kernel.client.execute("import getpass\ninput('name? '), getpass.getpass('word? ')")
    for prompt, password, answer in (("name? ", False, "ada"), ("word? ", True, "x")):
        asked = kernel.client.get_stdin_msg(timeout=TIMEOUT_S)
        assert asked["content"] == {"prompt": prompt, "password": password}
        kernel.client.input(answer)
    assert kernel.finish(waiting).data("execute_result") == [{"text/plain": "('ada', 'x')"}]
    assert kernel.run("input()", allow_stdin=False).reply["ename"] == "StdinNotImplementedError"
    waiting = kernel.client.execute("input()")
    kernel.client.get_stdin_msg(timeout=TIMEOUT_S)
    kernel.manager.interrupt_kernel()
    assert kernel.finish(waiting).reply["ename"] == "KeyboardInterrupt"


def test_objects_are_shown_by_what_they_say_of_themselves(kernel: Client) -> None:
    kernel.run(
        "class Rich:\n"
        "    def __repr__(self): return 'rich'\n"
        "    def _repr_html_(self): return '<b>rich</b>'\n"
        "    def _repr_mimebundle_(self, include=None, exclude=None): return {'x/y': 1}, {'x/y': {'wide': True}}\n"
    )
    ran = kernel.run("Rich()")
    assert ran.data("execute_result") == [{"text/plain": "rich", "text/html": "<b>rich</b>", "x/y": 1}]
    assert ran.outputs[0][1]["metadata"] == {"x/y": {"wide": True}}
    assert kernel.run("Rich").data("execute_result") == [{"text/plain": "<class '__main__.Rich'>"}]
    ran = kernel.run("from IPython.display import display\nplace = display(Rich(), display_id=True)\nplace.update(5)")
    assert ran.kinds == ["display_data", "update_display_data"]
    assert ran.outputs[0][1]["transient"] == ran.outputs[1][1]["transient"] != {}
    assert ran.data("update_display_data") == [{"text/plain": "5"}]
    ran = kernel.run("from IPython.display import clear_output\nclear_output(wait=True)\nprint(1)")
    assert ran.outputs[0] == ("clear_output", {"wait": True})


def test_a_figure_is_shown_as_a_picture(kernel: Client) -> None:
    ran = kernel.run("from matplotlib.figure import Figure\nshown = Figure()\n_ = shown.subplots()\nshown")
    (data,) = ran.data("execute_result")
    assert str(data["image/png"]).startswith("iVBORw0KGgo")


def test_help_is_paged_for_a_person_and_printed_for_a_program(kernel: Client) -> None:
    ran = kernel.run("help(len)")
    assert ran.text("stdout") == "\n"  # the helper's own, after its pager
    assert "Return the number of items" in str(ran.reply["payload"])
    assert str(ran.reply["payload"]).count("'source': 'page'") == 1
    ran = kernel.run("help(len)", allow_stdin=False)
    assert "Return the number of items" in ran.text("stdout")
    assert ran.reply["payload"] == []


def test_the_exit_builtin_asks_the_client_to_leave(kernel: Client) -> None:
    for code in ("exit()", "quit()"):
        ran = kernel.run(code)
        assert ran.outputs == []
        assert ran.reply["payload"] == [{"source": "ask_exit", "keepkernel": False}]
    assert kernel.run("import sys; sys.exit()").reply["ename"] == "SystemExit"
    assert kernel.run("1").reply["status"] == "ok"


def test_completion_inspection_and_completeness_speak_of_the_console_as_it_is(kernel: Client) -> None:
    kernel.run("class Box:\n    '''A box.'''\n    def open(self, lid, *, slowly=True): '''Open it.'''\nbox = Box()")
    reply = kernel.reply(kernel.client.complete("x = box.op + 1", cursor_pos=10))
    assert (reply["matches"], reply["cursor_start"], reply["cursor_end"]) == (["open"], 8, 10)
    assert kernel.reply(kernel.client.complete("f().op"))["matches"] == []
    assert kernel.reply(kernel.client.complete("nothing.op"))["matches"] == []
    for code, cursor in (("box.open(1, ", 12), ("box.open", 6), ("print(box.open)", 12)):
        reply = kernel.reply(kernel.client.inspect(code, cursor_pos=cursor))
        assert "box.open(lid, *, slowly=True)" in reply["data"]["text/plain"]  # type: ignore[index]
        assert "Open it." in reply["data"]["text/plain"]  # type: ignore[index]
    assert kernel.reply(kernel.client.inspect("nothing"))["found"] is False
    kernel.run("import textwrap")
    sources = [
        kernel.reply(kernel.client.inspect("textwrap.dedent", detail_level=level))["data"]["text/plain"]  # type: ignore[index]
        for level in (0, 1)
    ]
    assert ["def dedent(text):" in source for source in sources] == [False, True]
    reply = kernel.reply(kernel.client.is_complete("class A:\n    def f(self):"))
    assert reply == {"status": "incomplete", "indent": " " * 8}
    reply = kernel.reply(kernel.client.is_complete("class A:\n    x = 1"))
    assert reply == {"status": "incomplete", "indent": " " * 4}
    assert kernel.reply(kernel.client.is_complete("class A:\n    x = 1\n    "))["status"] == "complete"


def test_a_comm_without_a_target_is_closed(kernel: Client) -> None:
    message = kernel.client.session.msg("comm_open", {"comm_id": "c", "target_name": "none", "data": {}})
    kernel.client.shell_channel.send(message)
    kinds: dict[str, Content] = {}
    while kinds.get("status") != {"execution_state": "idle"}:
        kind, content = kernel.published(message["header"]["msg_id"])
        kinds[kind] = content
    assert kinds["comm_close"] == {"comm_id": "c", "data": {}}
    assert kernel.reply(kernel.client.comm_info())["comms"] == {}


def test_the_kernel_says_what_it_is(kernel: Client) -> None:
    reply = kernel.reply(kernel.client.kernel_info())
    about = reply["language_info"]
    assert isinstance(about, dict)
    assert about["version"] == ".".join(map(str, sys.version_info[:3]))
    assert {"pygments_lexer", "codemirror_mode", "nbconvert_exporter", "mimetype"} <= about.keys()
    assert str(reply["banner"]).startswith("Python 3.")
