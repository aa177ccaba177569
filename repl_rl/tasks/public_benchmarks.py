"""Public benchmark suites as tasks, each with its judge.

They are GSM8K, MATH, MATH-500, AIME, HumanEval, MBPP, CRUXEval and DABench.

Each published form of a suite is supported: full and sanitized MBPP, and AIME with or without capital field names. The
judge `tests` grades HumanEval and MBPP. Their answer is a program, or a function of the console.
"""

import ast
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from repl_rl.errors import ConfigError
from repl_rl.tasks.find_trivial_tests import can_fail, find_check_mistake, find_mistake
from repl_rl.tasks.parse_assertions import find_isclose_names, qualify_isclose, split_assertion
from repl_rl.tasks.read_rows import FieldOptions, TaskRow, get_field, get_field_name, read_from_folder, read_rows
from repl_rl.tasks.task import Task, fingerprint_question
from repl_rl.tasks.task_source import TaskRequest, TaskSource
from repl_rl.tasks.task_workspace import Workspace
from repl_rl.tasks.validate_text import NotPython, parse_python, print_python, validate_utf8

_SHOWN_CHARS = 80
_QUIET_TEMPLATE = """\
_quiet = [__import__("contextlib").redirect_stdout(__import__("io").StringIO())]
_quiet.append(__import__("contextlib").redirect_stderr(_quiet[0]._new_target))
[each.__enter__() for each in _quiet]
{code}
[each.__exit__(None, None, None) for each in _quiet[::-1]]
"""
"""Template that runs code and drops its output. The code is not indented, since that would alter texts in it."""
SuiteAdapter = Callable[[TaskRow, FieldOptions], Task]


def make_gsm8k_task(row: TaskRow, options: FieldOptions) -> Task:
    """Return a task of GSM8K: `question`, and `answer`, which ends in `#### ` and a number. The judge is `numeric`."""
    worked = get_field(row, options, "answer", "answer")
    _, marker, answer = worked.rpartition("####")
    if not marker or not answer.strip():
        raise ConfigError(f"{row.location}: answer", worked[-_SHOWN_CHARS:], "end it with '#### ' and the number")
    return Task(
        id=f"gsm8k-{row.number - 1}",
        question=get_field(row, options, "question", "question"),
        answer=answer.strip(),
        judge=options.get("judge", "numeric"),
        family=get_field(row, options, "family", "family", default="gsm8k"),
        where=row.describe_field(get_field_name(row, options, "answer", "answer")),
    )


def make_math_task(row: TaskRow, options: FieldOptions) -> Task:
    """Return a task of MATH: `problem` or `question`, and `answer`, or a `solution` with the answer in `\\boxed{}`.

    The judge is `math`, and each subject is a family.
    """
    question = "question" if row.get_value("problem") is None else "problem"
    given = get_field(row, options, "answer", "answer", default="")
    answer = given or _extract_boxed_answer(row)
    family = row.get_text("subject", "") or row.get_text("type", "math")
    return Task(
        id=f"math-{get_field(row, options, 'id', 'id', default='') or row.get_text('unique_id', str(row.number - 1))}",
        question=get_field(row, options, "question", question),
        answer=answer,
        judge=options.get("judge", "math"),
        family=get_field(row, options, "family", "family", default=family),
        where=row.describe_field(get_field_name(row, options, "answer", "answer") if given else "solution"),
    )


def _extract_boxed_answer(row: TaskRow) -> str:
    """Return the content of the last `\\boxed{}` of the solution, including inner braces."""
    solution = row.get_text("solution")
    _, marker, rest = solution.rpartition("\\boxed{")
    # Find the brace that closes it.
    depth = 1
    for at, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0 and marker and rest[:at].strip():
            return rest[:at].strip()
    raise ConfigError(f"{row.location}: field 'solution'", solution[-_SHOWN_CHARS:], "put the answer into \\boxed{...}")


def make_math500_task(row: TaskRow, options: FieldOptions) -> Task:
    """Return a task of MATH-500: `problem`, `answer`, `subject`, `level`, `unique_id`.

    The judge is `math`, and each level is a family.
    """
    level = row.get_text("level", "")
    return Task(
        id=_make_task_name("math500", row, options, "unique_id", "id"),
        question=get_field(row, options, "question", "problem"),
        answer=get_field(row, options, "answer", "answer"),
        judge=options.get("judge", "math"),
        family=get_field(row, options, "family", "family", default=f"math500/{level}" if level else "math500"),
        where=row.describe_field(get_field_name(row, options, "answer", "answer")),
    )


def make_aime_task(row: TaskRow, options: FieldOptions) -> Task:
    """Return a task of AIME: `problem` or `question`, `answer`, `id`, with or without capitals.

    The answer is an integer from 0 to 999.
    """
    answer = get_field(row, options, "answer", "answer", "Answer")
    plain = answer.strip().removesuffix(".0")
    if not (plain.isascii() and plain.isdigit() and len(plain.lstrip("0")) <= 3):
        raise ConfigError(
            f"{row.location}: answer", answer[:_SHOWN_CHARS], "answers of AIME are whole numbers, 0 to 999"
        )
    return Task(
        id=_make_task_name("aime", row, options, "id", "ID", "problem_idx"),
        question=get_field(row, options, "question", "problem", "Problem", "question"),
        answer=str(int(plain)),
        judge=options.get("judge", "numeric"),
        family=get_field(row, options, "family", "year", "Year", default="aime"),
        where=row.describe_field(get_field_name(row, options, "answer", "answer", "Answer")),
    )


def make_humaneval_task(row: TaskRow, options: FieldOptions) -> Task:
    """Return a task of HumanEval: `task_id`, `prompt`, `test` (which defines `check`), `entry_point`.

    The answer may be a whole program, a continuation of the prompt, or the function as defined in the console.
    """
    prompt, entry = get_field(row, options, "question", "prompt"), row.get_text("entry_point")
    if not entry.isidentifier():
        raise ConfigError(f"{row.location}: field 'entry_point'", entry, "give the name of a function")
    tests = _DoctestBuilder(row, _build_helper_code(prompt))
    # Refuse tests that could not tell a right program from a wrong one.
    test_code = row.get_text("test")
    mistake = find_check_mistake(tests.parse_statements(test_code), entry)
    if mistake is not None:
        raise ConfigError(row.describe_field("test"), test_code[:_SHOWN_CHARS], mistake)
    split = _split_check_function(tests, test_code)
    # Plain assertions become single tests; any other `check` runs as a whole.
    if split is None:
        tests.add_tests(f"{test_code}\ncheck({entry})")
    else:
        setup, assertions = split
        tests.add_setup("\n".join([*setup, f"candidate = {entry}"]))
        for assertion in assertions:
            tests.add_tests(assertion)
    question = f"Complete this function. Submit it, or a program that defines it as one text.\n\n{prompt.rstrip()}\n"
    return Task(
        id=_make_task_name("humaneval", row, options, "task_id"),
        question=question,
        answer=str(tests),
        judge=options.get("judge", "tests"),
        family=get_field(row, options, "family", "family", default="humaneval"),
        where=row.describe_field("test"),
    )


def make_mbpp_task(row: TaskRow, options: FieldOptions) -> Task:
    """Return a task of MBPP: `text` or `prompt`, `test_list`, `task_id`; optionally `test_setup_code`, `test_imports`.

    The question shows the tests, as its authors do, because only they contain the function's name.
    """
    tests = _read_texts(row, "test_list")
    if not tests:
        raise ConfigError(f"{row.location}: field 'test_list'", row.get_value("test_list"), "give at least one test")
    # The setup runs before the tests, which may use its imports and helpers.
    setup = [*_read_texts(row, "test_imports"), *filter(None, [row.get_text("test_setup_code", "")])]
    doctests = _DoctestBuilder(row, "\n".join(setup))
    # Refuse tests that test nothing.
    parsed = [doctests.parse_statements(test).body for test in tests]
    for test, statements in zip(tests, parsed, strict=True):
        for statement in statements:
            mistake = find_mistake(statement)
            if mistake is not None:
                raise ConfigError(row.describe_field("test_list"), test[:_SHOWN_CHARS], mistake)
    if not any(map(can_fail, parsed)):
        raise ConfigError(row.describe_field("test_list"), tests[0][:_SHOWN_CHARS], "it tests nothing; give an assert")
    for test in tests:
        doctests.add_tests(test)
    listing = "\n".join(tests)
    description = get_field(row, options, "question", "text", "prompt")
    instruction = "Submit the function, or a program that defines it as one text. It must pass these tests:"
    return Task(
        id=_make_task_name("mbpp", row, options, "task_id"),
        question=f"{description}\n{instruction}\n\n{listing}\n",
        answer=str(doctests),
        judge=options.get("judge", "tests"),
        family=get_field(row, options, "family", "family", default="mbpp"),
        where=row.describe_field("test_list"),
    )


def _make_task_name(suite: str, row: TaskRow, options: FieldOptions, *fields: str) -> str:
    """Return the id of a task: the suite, and the row's own name or its number from 0."""
    name = get_field(row, options, "id", *fields, default=str(row.number - 1)) if fields else str(row.number - 1)
    tail = name.removeprefix("HumanEval/").removesuffix(".json").strip("/").replace("/", "-")
    return f"{suite}-{tail}"


def _read_texts(row: TaskRow, field: str) -> Sequence[str]:
    """Return a field that is a list of texts, or the JSON of such a list. A missing field has no texts."""
    value = row.get_value(field)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            # The text is itself the only item.
            value = [value]
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ConfigError(row.describe_field(field), str(value)[:_SHOWN_CHARS], "give a list of texts")
    for item in value:
        validate_utf8(row.describe_field(field), item)
    return tuple(value)


def _build_helper_code(prompt: str) -> str:
    """Return code that defines what the prompt defines, such as helpers that the tests call.

    Definitions of the program take precedence. A prompt that ends after `def f(x):` is completed with `pass`.
    """
    last_line = prompt.rstrip().rpartition("\n")[2]
    indent = last_line[: len(last_line) - len(last_line.lstrip())] + " "
    for code in (prompt, f"{prompt.rstrip()}\n{indent}pass\n"):
        try:
            parse_python(code)
        except NotPython:
            continue
        # A program that is complete needs none of them, so an error here decides nothing.
        guarded_code = f"try:\n    exec({code!r}, globals())\nexcept Exception:\n    pass\n"
        return f"_own = dict(globals())\n{guarded_code}globals().update(_own)\n"
    return ""


class _DoctestBuilder:
    """Tests as doctests that run in a console after the program.

    An assertion that can be split keeps its expected value on the host. After other tests, the console prints a word
    that the program cannot know. A program that ends the console, or keeps the tests from running, therefore fails.
    Output of the program itself does not matter.
    """

    def __init__(self, row: TaskRow, setup: str) -> None:
        self._row = row
        self._isclose = find_isclose_names([])
        # A warning about a text in a test is not a failure.
        self._examples = [">>> __import__('warnings').simplefilter('ignore')\n"]
        self.add_setup(setup)

    def add_setup(self, code: str) -> None:
        """Run code before the tests that follow.

        Raises:
            ConfigError: the code is not Python.
        """
        self._isclose |= find_isclose_names(list(ast.walk(self.parse_statements(code))))
        if code.strip():
            self._add_example(_QUIET_TEMPLATE.format(code=code))

    def add_tests(self, code: str) -> None:
        """Add tests: Python that raises an error if one fails.

        Raises:
            ConfigError: the code is not Python.
        """
        statements = self.parse_statements(code).body
        for statement in statements:
            qualify_isclose(statement, self._isclose)
        if statements and all(split_assertion(statement) for statement in statements):
            self._examples += [f">>> {self.unparse_statement(statement, code)}\n" for statement in statements]
        else:
            # The program cannot know this word, so it cannot print it itself.
            marker = f"passed {fingerprint_question(code)[:16]}"
            self._add_example(f"{_QUIET_TEMPLATE.format(code=code)}print({marker!r})\n", f"{marker}\n")

    def parse_statements(self, code: str) -> ast.Module:
        """Parse code.

        Raises:
            ConfigError: the code is not Python.
        """
        try:
            return parse_python(code)
        except NotPython as error:
            raise self._make_error(code, error) from error

    def unparse_statement(self, statement: ast.stmt, code: str) -> str:
        """Return the code of a statement of `code`.

        Raises:
            ConfigError: the statement is too deep, or has a number that is too long to print.
        """
        try:
            return print_python(statement)
        except NotPython as error:
            raise self._make_error(code, error) from error

    def _make_error(self, code: str, error: NotPython) -> ConfigError:
        return ConfigError(f"{self._row.location}: tests", code[:_SHOWN_CHARS], f"they are not Python: {error}")

    def _add_example(self, code: str, printed: str = "") -> None:
        self._examples.append(f">>> __import__('builtins').exec({code!r}, globals())\n{printed}")

    def __str__(self) -> str:
        return "".join(self._examples)


def _split_check_function(tests: _DoctestBuilder, test: str) -> tuple[Sequence[str], Sequence[str]] | None:
    """Return the code before `def check(candidate)` and its assertions, or None if the test contains anything else."""
    setup, assertions = [], None
    for statement in tests.parse_statements(test).body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "check":
            names = [argument.arg for argument in statement.args.args]
            assertions = [part for part in statement.body if not _is_noop(part)]
            has_plain_signature = names == ["candidate"] and not statement.decorator_list
            if not has_plain_signature or not all(isinstance(part, ast.Assert) for part in assertions):
                return None
        elif assertions is not None:
            return None
        else:
            setup.append(tests.unparse_statement(statement, test))
    return None if assertions is None else (setup, [tests.unparse_statement(part, test) for part in assertions])


def _is_noop(statement: ast.stmt) -> bool:
    """Return True for `pass`, a bare constant such as a text, and `assert True`."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(statement, ast.Assert):
        value = statement.test if isinstance(statement.test, ast.Constant) and statement.test.value else None
    return isinstance(statement, ast.Pass) or isinstance(value, ast.Constant)


def make_cruxeval_output_task(row: TaskRow, options: FieldOptions) -> Task:
    """Return a task of CRUXEval that asks for the value that a function returns. The judge is `literal`."""
    code, call = row.get_text("code"), f"f({row.get_text('input', '')})"
    return Task(
        id=f"cruxeval-output-{row.get_text('id', str(row.number - 1)).removeprefix('sample_')}",
        question=f"{code}\n\nWhat does {call} return? Submit the value as a Python literal.",
        answer=row.get_text("output"),
        judge=options.get("judge", "literal"),
        family="output",
        where=row.describe_field("output"),
    )


def make_cruxeval_input_task(row: TaskRow, options: FieldOptions) -> Task:
    """Return a task of CRUXEval that asks for arguments with which a function returns a value.

    The judge is `arguments`: any arguments that give the value are right.
    """
    code, output = row.get_text("code"), row.get_text("output")
    return Task(
        id=f"cruxeval-input-{row.get_text('id', str(row.number - 1)).removeprefix('sample_')}",
        question=f"{code}\n\nWith which arguments does f return {output}? "
        "Submit a text of Python literals as in a call, such as submit_final_answer(\"[1, 2], 'a'\").",
        answer=output,
        judge=options.get("judge", "arguments"),
        family="input",
        where=row.describe_field("output"),
    )


class DABench(TaskSource):
    """Questions about tables, which the console reads from a file. The judge is `named_values`.

    The place is a folder with `questions.jsonl`, `labels.jsonl` and `tables/`, or the names that the authors gave them.
    """

    kind: ClassVar[str] = "dabench"
    about: ClassVar[str] = "folder of DABench, questions about tables"

    def load(self, place: str, request: TaskRequest) -> Iterable[Task]:
        """See `TaskSource.load`."""
        folder = Path(place)
        questions, labels = (_find_first(folder, names) for names in (_DABENCH_QUESTIONS, _DABENCH_LABELS))
        tables = _find_first(folder, _DABENCH_TABLES)
        answers = {row.get_text("id"): _read_dabench_answer(row) for row in read_rows(str(labels), {})}
        # Tasks of one table share its workspace.
        workspaces: dict[str, Workspace] = {}
        for row in read_rows(str(questions), {}):
            name, id = row.get_text("file_name"), row.get_text("id")
            if id not in answers:
                raise ConfigError(row.describe_field("id"), id, f"{labels} has no answer; add one")
            if name not in workspaces:
                content = read_from_folder(row.describe_field("file_name"), name, tables)
                told = f"The table is in the file {name!r}. pandas is installed."
                workspaces[name] = Workspace(files={name: content}, preload=("pandas",), told=told)
            texts = [
                row.get_text("question"),
                row.get_text("constraints", ""),
                f"Submit one text in this format: {row.get_text('format')}",
            ]
            yield Task(
                id=f"dabench-{id}",
                question="\n".join(text for text in texts if text),
                answer=answers[id],
                judge="named_values",
                family=row.get_text("level", "dabench"),
                workspace=workspaces[name],
                fields={"concepts": row.get_value("concepts"), "file_name": name},
                where=f"{labels}: id {id}",
            )

    def runs_code(self, place: str) -> bool:
        """See `TaskSource.runs_code`. Tables are data."""
        return False


def _find_first(folder: Path, names: Sequence[str]) -> Path:
    """Return the first of these files or folders that exists.

    Raises:
        ConfigError: none does.
    """
    found = next((folder / name for name in names if (folder / name).exists()), None)
    if found is None:
        raise ConfigError("folder of DABench", str(folder), f"it has no {names[0]}; give the folder that has it")
    return found


def _read_dabench_answer(row: TaskRow) -> str:
    """Return the labels of a row, pairs of name and value, as an answer would state them."""
    pairs = row.get_value("common_answers")
    if not isinstance(pairs, list) or not pairs:
        raise ConfigError(row.describe_field("common_answers"), pairs, "give pairs of a name and a value")
    parts = []
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise ConfigError(row.describe_field("common_answers"), pair, "give a name and a value, both texts")
        parts.append(f"@{pair[0]}[{pair[1]}]")
    return "\n".join(parts)


_DABENCH_QUESTIONS = ("questions.jsonl", "da-dev-questions.jsonl")
_DABENCH_LABELS = ("labels.jsonl", "da-dev-labels.jsonl")
_DABENCH_TABLES = ("tables", "da-dev-tables")
SUITES: Sequence[tuple[str, str, SuiteAdapter]] = (
    ("gsm8k", "GSM8K", make_gsm8k_task),
    ("math", "MATH", make_math_task),
    ("math500", "MATH-500", make_math500_task),
    ("aime", "AIME", make_aime_task),
    ("humaneval", "HumanEval", make_humaneval_task),
    ("mbpp", "MBPP", make_mbpp_task),
    ("cruxeval", "CRUXEval, outputs", make_cruxeval_output_task),
    ("cruxeval-input", "CRUXEval, inputs", make_cruxeval_input_task),
)
"""Prefix, title and adapter of each suite."""
