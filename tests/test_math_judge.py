"""Judge `math`: which texts are one formula, in the spelling of Python, sympy, numpy or LaTeX."""

import pytest

from repl_rl.judges.formulas import is_equal, is_readable
from repl_rl.judges.python_formulas import NotPython, TooLarge, read_python

EQUAL = (
    ("0.00001", "1e-05"),
    ("10^{20}", "1e+20"),
    ("100000000000000000000", "1e+20"),
    ("e^2", "exp(2)"),
    (r"\ln 3", "log(3)"),
    (r"\sin 1", "sin(1)"),
    (r"\arctan 2", "atan(2)"),
    ("|x|", "Abs(x)"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "Matrix([[1, 2], [3, 4]])"),
    ("120", "factorial(5)"),
    (r"\frac{1}{x}", "x**-1"),
    ("14-i", "14.0 - 1.0*I"),
    (r"\frac13", "Fraction(1, 3)"),
    (r"\frac13", "Rational(1,3)"),
    ("0.5", "np.float64(0.5)"),
    (r"\{1,2,3\}", "{3, 2, 1}"),
    ("(1,2)", "(1, 2)"),
    ("True", "True"),
    (r"\text{True}", "True"),
    (r"\sqrt{2}", "1.4142135623730951"),
    (r"4\sqrt{2}", r"4\sqrt(2)"),
    (r"4\sqrt{2}", "4*sqrt(2)"),
    ("blue", "blue"),
    (r"\text{blue}", "blue"),
    ("blue", r"\text{Blue}"),
    ("xy", "x*y"),
    ("2xy", "2*x*y"),
    ("2yx", "2*x*y"),
    ("xy", "xy"),
    ("x*y", "xy"),
    ("x=5", "5"),
    ("5", "x = 5"),
    ("1,000.5", "1000.5"),
    ("1000.5", "1,000.5"),
    (r"50\%", "50%"),
    ("0.5", "50%"),
    ("50", "50%"),
    ("1000", "1_000"),
    ("16", "0x10"),
    ("-5", "−5"),
    ("0", "-0.0"),
    ("42", "'42'"),
    ("[1,2]", "[1, 2]"),
    ("1,2", "2, 1"),
    ("1,2", "[1, 2]"),
    (r"\infty", "oo"),
    (r"\infty", "inf"),
    (r"\infty", "float('inf')"),
    (r"\frac{x}{3}", "0.3333333333333333*x"),
    (r"(1/3, \sqrt2)", "(0.3333333333333333, 1.4142135623730951)"),
    ("x+y", "x + y"),
    ("x^2+2x+1", "(x+1)**2"),
    (r"\frac{\pi}{2}", "1.5707963267948966"),
    (r"\frac{\pi}{2}", "math.pi/2"),
    ("1<x<3", "(1 < x) & (x < 3)"),
    (r"(-\infty,3)\cup(5,\infty)", "Union(Interval.open(-oo, 3), Interval.open(5, oo))"),
    ("[0,1]", "Interval(0, 1)"),
    ("[0,1)", "Interval.Ropen(0,1)"),
    (r"\frac12", "1/2"),
    (r"5 \text{ cm}", "5"),
    (r"90^\circ", "90"),
    (r"\$18", "18"),
    ("18", "$18"),
    (r"\boxed{18}", "18"),
    ("18", r"\boxed{18}"),
    ("42", "6*7 = 42"),
    (r"x\in[1,2]", "[1,2]"),
    ("red and blue", "blue, red"),
    ("9", "3^2"),
    (r"\binom{5}{2}", "binomial(5,2)"),
    ("3+4i", "3+4j"),
    ("3+4i", "(3+4j)"),
    ("3+4i", "3 + 4*I"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{(C)}", "C"),
    ("C", "(C)"),
    (r"\text{June 20}", "June 20"),
    ("3", "[3]"),
    ("x=3", "{x: 3}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "[1, 2]"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "[[1 2]\n [3 4]]"),
    ("y=2x+3", "y = 2*x + 3"),
    ("y=2x+3", "2*x+3"),
    ("11:15", "11:15"),
    ("3:5", "3:5"),
    (r"\frac{\sqrt{3}}{2}", "sqrt(3)/2"),
    (r"\frac{\sqrt{3}}{2}", "0.8660254037844386"),
    ("1/3", "0.333333333333"),
    (r"12 \text{ pm}", "12 pm"),
    (r"2\frac{1}{2}", "5/2"),
    ("10!", "3628800"),
    ("3", "3.0"),
    (r"\log_2 8", "log(8, 2)"),
    (r"\emptyset", "set()"),
    (r"\emptyset", "EmptySet"),
    (r"\sqrt[3]{2}", "2**(1/3)"),
    (r"\theta", "theta"),
    (r"2\pi r", "2*pi*r"),
    ("abc", "a*b*c"),
    ("6", "np.int64(6)"),
    ("0.1", "Decimal('0.1')"),
    (r"\left(3,\frac{\pi}{2}\right)", "(3, pi/2)"),
    (r"(3,\frac{\pi}{2})", "(3, 1.5707963267948966)"),
    ("1.5", "3/2"),
    (r"1\%", "0.01"),
    ("x_1", "x_1"),
    ("1", "1.0000000001"),
    ("{1: 2}", "{1: 2.0}"),
    ("10^{-400}", "1e-400"),
    ("(1, 2)", "np.array([1, 2])"),
    ("nan", "nan"),
    (r"\text{no solution}", "No solution"),
    ("x<3", "3 > x"),
    ("x*y + 1", "xy + 1"),
    (r"\frac{1}{2006!}", "1/factorial(2006)"),
    ("0.5", "Rational('1/2')"),
    ("3", "abs(-3)"),
    ("5", "max(3, 5)"),
)
UNEQUAL = (
    ("5", "5 # 6"),
    (r"\frac{1}{2^{98}}", "1/2**99"),
    ("1/2^{98}", "1/2^99"),
    ("1/2006!", "1/2004!"),
    (r"\frac{1}{2006!}", "1/factorial(2004)"),
    (r"\sqrt{2}", "1.414214"),
    ("blue", "lube"),
    (r"\text{blue}", "lube"),
    (r"\text{blue}", r"\text{lube}"),
    ("4", r"4\sqrt(2)"),
    (r"\{red, blue\}", r"\{der, lube\}"),
    ("{red, blue}", "{der, lube}"),
    ("on", "no"),
    ("42", "41\n42"),
    ("42", "41$ $42"),
    ("42", r"41 \to 42"),
    ("42", r"42\approx 41"),
    ("42", r"\boxed{42}$ junk $41"),
    ("42", "41=42"),
    ("42", r"42\in\{1\}"),
    ("18", "17 or 18"),
    ("18", "18 eggs"),
    ("18", "{17, 18}"),
    ("1", "True"),
    ("0", "False"),
    ("1/3", "0.3333333"),
    ("x", "y"),
    ("3", ""),
    ("nan", "3"),
    ("3", "nan"),
    ("inf", "-inf"),
    ("1000000000001", "1000000000000"),
    ("0", "1e-30"),
    ("42", "[42, 42]"),
    ("2", "nan"),
    ("4 blue", "4 lube"),
    ("(1,2)", "(2,1)"),
    ("42", r"41 \Rightarrow 42"),
    ("42", r"41 \implies 42"),
    ("42", "0\n42"),
    ("2x+1", "2*x + 1.0001"),
    ("cat", "act"),
    ("e^x", "e^y"),
    ("1/2006!", "1/2005!"),
    ("50", "0.5"),
    (r"\frac{1}{10^{50}}", "0"),
    ("(x+1)/2^{98}", "(x+1)/2^99"),
    ("42", "42$ $41"),
    ("42", "42\n41"),
    ("42", r"\boxed{41} \boxed{42}"),
    ("42", r"\boxed{42} \boxed{41}"),
    ("x", "x = 5"),
    ("{1: 2}", "{1: 3}"),
    ("1", "1.00000001"),
    ("(1, 2, 3)", "(1, 2)"),
)


@pytest.mark.parametrize(("reference", "answer"), EQUAL)
def test_equal_values_are_equal_in_every_spelling(reference: str, answer: str) -> None:
    assert is_equal(reference, answer)


@pytest.mark.parametrize(("reference", "answer"), UNEQUAL)
def test_near_misses_anagrams_and_several_formulas_are_wrong(reference: str, answer: str) -> None:
    assert not is_equal(reference, answer)


@pytest.mark.parametrize(
    "text", ["9**9**9", "factorial(10**9)", "2**(2**30)", "1e99999", "1.5**(10**9)", "comb(10**6, 9)"]
)
def test_python_of_unbounded_size_is_refused_before_it_is_worked_out(text: str) -> None:
    with pytest.raises(TooLarge):
        read_python(text, real=True)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "open('x')",
        "(lambda: 1)()",
        "[x for x in (1,)]",
        "(1).__class__",
        "print(1)",
        "exec('1')",
        "f'{1}'",
        "x if x else y",
        "sqrt(evaluate=False)",
        "math.sqrt.__globals__",
        "Symbol('x')",
        "(" * 300 + ")" * 300,
        "~1",
        "x := 1",
    ],
)
def test_only_names_and_operators_of_formulas_are_read(text: str) -> None:
    with pytest.raises(NotPython):
        read_python(text, real=True)


@pytest.mark.parametrize(
    "text",
    ["18", r"\frac12", "blue", "[1, 2)", "11:15", "June 20", "exp(2)", r"5\text{ cm}", r"\text{(C)}", "-\\infty"],
)
def test_formulas_words_and_plain_texts_are_references(text: str) -> None:
    assert is_readable(text)
    assert is_equal(text, text)


@pytest.mark.parametrize("text", [r"\text{}", "", "$$", r"\frac{1}{", "(", "1 +", "}{", r"\boxed{}", "3 $ 4"])
def test_a_text_that_no_answer_can_equal_is_no_reference(text: str) -> None:
    assert not is_readable(text)
