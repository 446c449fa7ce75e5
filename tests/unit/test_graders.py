r"""Graders of numbers, mathematics and letters: one verdict in rewards and in evaluations (10 s).

Each table has right answers in the ways in which they are written, and as many wrong ones that look
right. A row is an answer and its reference; ``|`` separates answers with the same reference.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from tinker_cookbook.eval.benchmarks import REGISTRY, Example, ExampleBenchmark
from tinker_cookbook.grading.letters import extract_mcq_answer
from tinker_cookbook.grading.mathematics import compare_quickly
from tinker_cookbook.grading.texts import split_thinking
from tinker_cookbook.recipes.code_rl.code_grading import extract_code_from_model
from tinker_cookbook.recipes.math_rl.math_env import Gsm8kEnv, MathEnv
from tinker_cookbook.recipes.rl_loop import reward_of

# Behind "#### " unless the text has a mark of its own.
NUMBERS = r"""
9500: \boxed{$9{,}500} | $9{,}500 | The answer is $9{,}500.
10000: \boxed{\$10{,}000} | 10\,000 | 10,\!000 | 10 000 | 10'000 | 10_000
72: 72 clips (48 + 24) | 72clips | 72 clips, since 48 + 24 = 72 | 72. | Answer: 72 | **72** | \(72\)
-5: -$5 | −5 | - 5 | -5.0 | $-5 | -\$5 | The answer is −5 | \boxed{-\frac{10}{2}} | –5
1500: 1.5e3 | 1.5 \times 10^{3} | 1.5×10³ | 1.5\cdot10^3 | 1,500 | 1.5 thousand | 1.5E+3
1000: 10^3 | \boxed{10^{3}} | 1e3 | one batch is 1000 | 1k
0.5: 1/2 | \frac{1}{2} | ½ | \frac12 | .5 | 50% | \boxed{\dfrac{1}{2}} | 0.50 | 3/6
3.5: 3 1/2 | 3\frac{1}{2} | \boxed{3 \frac{1}{2}} | 3½ | 7/2 | The answer is 7/2.
18: 18 (24 - 6) | 18 = 24 - 6 | 24 - 6 = 18 | x = 18 | \boxed{x = 18} | \boxed{18\text{ cm}^2}
18: １８
18: 18 dollars | USD 18 | €18 | 18€ | $18.00 per day | 18 cm² | 18 kg/m^3 | 18, not 20
18: \boxed{18/1} | +18
18: The answer is 18! | So 18 are left. | **Answer:** 18 | ### Answer\n\n18
18: \boxed{18}, \boxed{18} | (18)
18: Die Antwort ist 18. | 答案是18元 | 答えは18です。 | La respuesta es 18. | \boxed{18^\circ}
18: \boxed 18
18: 4*9=\boxed{36}\n#### 18 | \boxed{18}\n#### Check\nIt is 6 eggs times 3
18: Step 1: add 3\nThe answer is 18.
50: 50% | \boxed{50\%}
36: 3 dozen | 36 eggs in 3 days | \boxed{36 \text{ eggs}}
1/3: 0.333333 | 2/6
1500000: 1.5 million | 1,500,000 | 1.5e6
1234567.89: $1,234,567.89 | 1234567.890
2.125: 2.125 | 2 1/8 | 17/8
42: <answer>\boxed{42}</answer> | <answer>**42**</answer>\nConfidence: 95 | Answer: \boxed{42}
42: <answer>42</answer> (from 40 + 2) | <think>\boxed{41}</think>\boxed{42} | 42 km
42: so \boxed{41}\n</think>\n\n#### 42 | <reasoning>\n#### 41</reasoning>\n<answer>42</answer>
22.2: 22.2 C | 22.2 C (72 F) | 22.2°C (72 F)
22.2: \boxed{22.2^\circ\text{C}} | \boxed{22.2^{\circ}\mathrm{C}}
1234: $1,234.00
"""
NOT_NUMBERS = r"""
9: \boxed{$9{,}500} | The answer is $9{,}500. | 9^9 | 9!
500: \boxed{$9{,}500} | 9,500
0: \boxed{\$10{,}000} | 10 000 | none | | 1/0
24: 72 clips (48 + 24) | 48/2 = 24\n#### none | 2*12 | 24 or 25 | either 24 or 25 | 24,25 | -24
5: -5 | −5 | -$5 | - 5 | 5! | \boxed{5!} | 5:30 | 2^5 | x5 | log 5 | f(5) | 5(3)
5: 5 hours and 30 minutes
3: 1.5e3 | -3 | −3 | - 3 | 3:4 | 3/4 | 3x | 3 times 6 | 3 x 6 | 3\frac{1}{2} | n - 3 | n-3
1: 1.5e3 | 1/2 | 1,5 | 1 000 | 1. Add the costs | 1.2.3 | 1 1/2
2: 1/2 | \frac{1}{2} | \boxed{2\pi} | \boxed{\sqrt{2}} | \boxed{2*9} | so it is x^{2} | 2.5 | 2/3
2: 2\cdot 3
18: \boxed{18, 20} | \boxed{18 or 20} | \boxed{18} or \boxed{20} | 18 to 20 | 18-20 | 18 (or 20)
18: 18? no, 20
18: 18 20 | 18; 20 | 18 ± 2 | 18+2 | x = 18, y = 20 | maybe 18, maybe 20 | 1 8 | 18.001 | 17.99
18: 180%
20: 18 or 20 | between 18 and 20 | x = 18, y = 20 | \boxed{18} and \boxed{20}
20: The answer is 18 or 20.
6: 18 (24 - 6) | \boxed{6\sqrt{2}} | 6% of 100 | 6 out of 8 | 5 to 6
7: \boxed{7/2} | The answer is 7/2. | 7-2 | 52_7
10: \boxed{10^3} | 10,000 | 10.000,00 | 10e1
50: 0.5% | 5.0 | 50% of 120 | 50/50
0.1: 0.10000001 | 1.0 | .01
18200: $18 $200 | $18$ $200$ | 18, 200
52: 52_8 | 52,5 | 5 2
0.5: \boxed{3 \frac{1}{2}} | 0.05 | 5
1/3: 0.33 | 3 | 1:3
42: <think>so \boxed{42} | <think>\boxed{42}</think>I give up. | \boxed{42}</think>I give up.
42: Hm.\n<thinking>\n#### 42 | <think>\nThe answer is 42. | <answer>42 or 43</answer>
42: <think>\boxed{42}</think><answer>41</answer> | <reasoning>#### 42 | 42 \times 2
43: <answer>42 or 43</answer> | <answer>44</answer> 43
"""
MATHEMATICS = r"""
-\frac{3}{4}: \frac{-3}{4} | \frac{3}{-4} | -0.75 | -3/4 | −\dfrac34 | -\tfrac{3}{4} | -75\%
\frac{3}{2}: 1 1/2 | 1\frac12 | 1.5 | \frac{6}{4} | 3/2 | 1½ | 2^{-1}\cdot 3
100, 200, 300: 100,200,300 | 300, 200, 100 | 100, 200 and 300 | 100,\;200,\;300
1200: 1,200 | 1{,}200 | 1,\!200 | 1200.0 | 1.2\times10^3 | 12 \cdot 100
17: 17\text{ square units} | 17 \text{ cm}^2 | 17\text{ miles per hour} | 17\text{ m/s}
17: 17 \text{ units}^2
17: 17 square units | 17 miles per hour | 17 cm^2 | 17cm | 17\,\mathrm{cm}^2 | x=17 | \$17
17: 17^\circ | 17.
17: 17 degrees | 34/2 = 17 | n = 17 | \textbf{17} | (17) | 17\text{ in.} | \text{Area} = 17 | $17$
17: 289^{1/2}
\frac{9\pi}{4}: \frac{9}{4}\pi \text{ cm}^2 | 2.25\pi | 9π/4 | \frac94 \pi\text{ square inches}
52_8: 52_{8} | 52_{\text{eight}} | 52 base 8 | 52 | (52)_8
1010_2: 1010 | 1010_{2} | 1010_{\text{two}}
31: 31_{10} | 31.0 | 31 \text{ ways}
1, 3, 5, \ldots, 2n-1: 1,3,5,\dots,2n-1 | 1, 3, 5, ..., 2n - 1 | 1,3,5,\cdots,-1+2n
\frac13: 0.333333 | 1/3 | \frac{2}{6} | 3^{-1}
\sqrt{8}: 2\sqrt{2} | 2\sqrt2 | 2√2 | 8^{1/2} | sqrt(8)
(3, \frac{\pi}{2}): (3,\pi/2) | \left( 3, \frac{\pi}{2} \right) | 3, \frac{\pi}{2} | (3.0, 0.5\pi)
(-\infty, 2) \cup (3, \infty): (-\infty,2)\cup(3,\infty) | (3,\infty) \cup (-\infty,2)
1+\sqrt2, 1-\sqrt2: 1 \pm \sqrt{2} | 1 - \sqrt{2}, 1 + \sqrt{2} | x = 1+\sqrt{2}, x = 1-\sqrt{2}
\{1,2\}: 2,1 | \{2, 1\} | 1 and 2 | \left\{1, 2\right\}
\text{Evelyn}: Evelyn | evelyn | \text{Evelyn.} | \mathrm{Evelyn}
\text{(C)}: C | (C) | \text{C} | \textbf{(C)}
2:15 pm: \text{2:15 p.m.} | 2:15 PM
50\%: 50 | 0.5 | 50\text{ percent} | \frac{1}{2}
\frac{1}{2^{98}}: 2^{-98} | \frac{2}{2^{99}}
[0,1): \left[0,1\right) | [0, 1) | x \in [0,1) | 0 \le x < 1 | 0<=x<1
(3,2): (p,q)=(3,2) | {3,2}
x \geq 5: x >= 5 | x ≥ 5 | 5 \le x | x \ge 5.0
\frac{639}{40}: \boxed{15\frac{39}{40}}, or $\boxed{\frac{639}{40}}$ | |AB| = \frac{639}{40}
\begin{pmatrix} 1 \\ 2 \end{pmatrix}: \begin{pmatrix}1\\2\end{pmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix}: \begin{pmatrix} 2/2 \\ 2 \end{pmatrix}
3x^2+2x: 2x + 3x^2 | x(3x+2) | f(x) = 3x^2+2x
y = 2x+1: y=1+2x | 2x + 1 | y = 2(x+\frac12)
5040: 7! | 5{,}040
\pi: 3.1415927 | π
3: \log_2 8 | \sqrt{9} | 3.000
(1, 200): (1,200) | (1, 200.0)
\frac13: <think>\boxed{3}</think>\boxed{\frac13}
"""
NOT_MATHEMATICS = r"""
\frac{3}{4}: \frac{-3}{4} | -\frac{3}{4} | \frac{4}{3} | 0.74 | 3,4 | \frac34, \frac43 | 34
1/2: \dfrac{-1}{2} | 2 | 12 | 0.5, -0.5 | \frac12 \text{ or } \frac13 | 1:2
\frac{11}{2}: 1 1/2 | 1\frac{1}{2} | \frac{1}{2} | 11,2
\frac{34}{5}: 3 4/5 | 3\frac45
(1, 2, 300): (1, 2300) | (1,2300) | (2, 1, 300) | [1, 2, 300] | \{1, 2, 300\}
100, 200, 300: 100200300 | 100, 200 | 100, 200, 301 | (300, 200, 100) | 100, 200, 300, 400
1200: 1, 200 | 1.200 | 12 00 | 1,2,0,0 | 120 | 1,2000
55: 5 5 | 5,5 | 5\cdot 5 | 5^5 | 5 + 5 | -55
\frac{1}{2^{99}}: \frac{1}{2^{98}} | 2^{99} | 0
\frac{1}{10^{8}}: 0.000000001 | 1e-7 | 0.0000001
\frac{1}{2^{31}}: 0.0000001 | 0.00000000046
\frac{1}{2004!}: \frac{1}{2006!} | 0
\frac{x}{2^{98}}: \frac{x}{2^{99}} | \frac{2x}{2^{98}}
1, 2, \ldots, n: 1, 3, 5, \ldots, 2n-1 | 1, 2, n | 1, 2, 3, \ldots, n | 1, 3, \ldots, n
1+2+\cdots+n: 1+2+n | 1+2+\cdots+2n
52_{10}: 52_8 | 52_{9} | 42
52: 52_8 | 5, 2 | 5.2
1010_3: 1010_2 | 1011_3 | 10
120_{8}: 120_{7} | 80_{10}
(0,1): [0,1] | (0,1] | (1,0) | 0 | \{0,1\}
(1,2): (2,1) | 2, 1 | 12 | 3
x=5: y=5 | x=-5 | x = 5, y = 5
\pi: 3.14 | 3.1416 | \frac{22}{7} | 2\pi
\frac13: 0.33 | 0.3333 | 3
\text{AFC}: ACF | AF | FCA
\text{odd}: even | odd or even | not odd
no: on | yes
2:15 pm: 2:15 am | 2:15 | 2.15
6: 2x=6 | x=6, y=7 | 6\pi | 6i | 3! + 1 | 6x | \pm 6
3: 3xy | 3 xy | 3n | 3 \text{ and } 4 | \boxed{3}, \boxed{4} | |3 + i|
50: 0.5\% | 500\% | 50, 51
1, 2: 1,1,2 | 1 | (2, 1) | 1 \text{ or } 3 | 1.2
1+\sqrt2: 1 \pm \sqrt2 | 1-\sqrt{2} | \sqrt{3}
\begin{pmatrix} 1 \\ 2 \end{pmatrix}: \begin{pmatrix}2\\1\end{pmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix}: \begin{pmatrix}1\\2\\3\end{pmatrix}
(-\infty,2)\cup[3,\infty): (-\infty, 2) \cup (3, \infty) | (-\infty,2)
0.1: 0.10000001 | 0.01
1234567890123457: 1234567890123456 | 1.234567890123457
i: -i | 1
A: a | B | \text{AB}
\sin x: \cos x | \sin 2x
x-1: x+1 | 1-x | x
x \ge 5: x > 5 | x \le 5 | x = 5 | 5
11a+c: 7 = 11a+c + 1 | 11a
5: not 5 | 5 cm or 6 cm | 5, 6 | \{5, 6\} | five hundred
\text{5 a.m.}: 5 p.m. | 5
\frac13: <think>so \boxed{\frac13} | <think>\boxed{\frac13}</think>I give up.
"""
# The letter of each response; none is "".
LETTERS = r"""
A: (a) | a | A | (A) | \boxed{\text{(A)}} | A. | The answer is A | Answer: (A) because
B: Final answer - B | 答案：B | b | b) | B. | **B** | Ｂ | 「B」 | 【答案】B | \boxed{(b)}
B: \boxed{B) Paris} | Option B
B: 答案是B。 | 答案为 B | 故选B。 | 选B | 正确选项是 B | 选项B正确 | 答えはBです | 정답: B
B: 정답은 B입니다 | Ответ: B
B: Die Antwort ist B. | Respuesta: B | Réponse : B | Risposta: B | {"answer": "B"}
B: <answer>\nB\n</answer>
B: The answer is B, not C. | The answer is B and C is wrong. | I'd go with B | ### Answer\nB
B: I choose (b). | Finally, B.
C: Answer: \(C\) | Therefore, C. | C is the answer. | My choice is C | It is C. | 正确答案：（C）
C: Answer: C. Because A fails.
D: I think it's D. | I think it’s D. | It must be D. | 所以，答案是 D 。 | Thus, the answer: (D).
D: Hence, (D). | answer (d) | d. 4 | (d) 4 | <think>Answer: B</think>Answer: D
"": <think>Answer: B | <think>Answer: B</think>I give up.
"": Answer: A and B | Answer: A or B | A, B | Both A and C | Answer: A/B | A & B | (A) and (C)
"": \boxed{A, B}
"": \boxed{A} or \boxed{B} | Answer: AB | The answer is A and B. | The answers are A and C.
"": Answer: A, B and C
"": A and B are both correct. | Options A and B are correct | The answer is not B.
"": None of the above | hepatitis B
"": Vitamin C is the answer. | The answer is either A or B. | C is not the answer. | Answer: E
"": (e) | I | It is a dog.
"": It's a trap. | Therefore, a dog. | 答案：A、B | 答案是A和B | Answer - none | So a is it
"": A good answer | Neither A nor B
B: The answer is (B). | answer is B | The final answer is $\boxed{B. Paris}$
B: The answer is \(\boxed{B}\) | The answer is: $B$ | <answer>B</answer> | answer: b | B) 4
B: B. Paris\n\nParis is the capital | **B. Paris** | The correct option is (B) 4
B: The correct answer is the second one, (B). | So B is correct | The answer is not A but it is B.
B: The statement (A) is not correct; it is (B) that holds | (B) is correct since (A) fails
B: The answer is B. A is wrong. | Answer is (A) or (B)? I'd say (B)
C: \boxed{C} | First \boxed{A}, corrected: \boxed{C} | **Answer: C** | The answer is "C".
C: The answer is\n\nC | Answer\nC | The correct answer is option C: Paris
C: The best choice is C, since | I would choose C
C: (A) is wrong, (B) is wrong, so the answer is (C).
C: (A) is wrong because it ignores friction. Therefore (C).
C: A) No, that violates momentum.\n\nWe choose C. | (A) Paris (B) London (C) Rome (D) Berlin. So (C)
C: My answer: C\n\nExplanation: A is a vowel.
D: $\boxed{\text{D}}$ | We can eliminate A and B. So it must be D.
D: Option A is incorrect. Option D is correct. | (A) is eliminated. Option D fits.
D: The answer is B? No, wait: the answer is D.
A: \boxed{\textbf{(A)}} | The correct answer is **A**. | The answer is A because it fits
A: The correct answer is (A) the heart (B) the liver
"": I think this is hard. | A bird can fly. | I am not sure. | The answer is a matter of taste.
"": The answer is A good idea | The answer is I don't know | Which is A true statement?
"": Let A be a set. Then A = B. | The answer is vitamin C. | Deficiency of vitamin C causes scurvy.
"": Answer: A B-cell is a lymphocyte. | The answer is C++. | The answer is E | Neither A nor B.
"": Plan B works | I. Introduction | \boxed{A bird} | A. foo\nB. bar\nC. baz\nD. qux
"""


def rows(table: str) -> list[tuple[str, str]]:
    """Returns pairs of answer and reference."""
    pairs: list[tuple[str, str]] = []
    for line in table.strip().split("\n"):
        # The reference may contain a colon without a space, as in 2:15.
        reference, _, answers = line.partition(": ")
        pairs += [(x.strip().replace("\\n", "\n"), reference) for x in answers.split(" | ")]
    return pairs


def evaluated(task: str, response: str, reference: str) -> bool:
    benchmark = REGISTRY[task]
    assert isinstance(benchmark, ExampleBenchmark)
    example = Example("x", [], reference, None, {"choices": ["w", "x", "y", "z"]})
    return benchmark.grade(response, example).reward == 1


@pytest.mark.parametrize(("table", "expected"), [(NUMBERS, True), (NOT_NUMBERS, False)])
def test_numbers(table: str, expected: bool):
    wrong: list[tuple[str, str]] = []
    for answer, reference in rows(table):
        has_mark = any(mark in answer for mark in ("####", "boxed", "nswer", "ntwort", "答"))
        has_mark = has_mark or any(mark in answer for mark in ("espuesta", "So 18", "so it"))
        response = answer if has_mark else f"Of 5 and 7.\n#### {answer}"
        env = Gsm8kEnv("q", reference, None)  # pyright: ignore[reportArgumentType]
        verdicts = {
            asyncio.run(env.check_answer(response)),
            evaluated("gsm8k", response, reference),
            bool(reward_of(response, reference)),
        }
        if verdicts != {expected}:
            wrong.append((answer, reference))
    assert wrong == []


@pytest.mark.parametrize(("table", "expected"), [(MATHEMATICS, True), (NOT_MATHEMATICS, False)])
def test_mathematics(table: str, expected: bool):
    pairs = rows(table)

    def boxed(answer: str) -> str:
        return answer if "boxed" in answer else f"It is $\\boxed{{{answer}}}$."

    async def rewards() -> list[bool]:
        work = (
            MathEnv("q", reference, None, grading_timeout_seconds=30).check_answer(boxed(answer))  # pyright: ignore[reportArgumentType]
            for answer, reference in pairs
        )
        return list(await asyncio.gather(*work))

    reward = asyncio.run(rewards())
    assert [x for x, given in zip(pairs, reward, strict=True) if given is not expected] == []
    # Both call the same function, so not every slow comparison is repeated here.
    slow = [pair for pair in pairs if compare_quickly(*pair) is None]
    again = [pair for pair in pairs if pair not in slow or slow.index(pair) % 8 == 0]
    found = [
        pair for pair in again if evaluated("math500", boxed(pair[0]), pair[1]) is not expected
    ]
    assert found == []


def test_letters():
    expected = {answer: letter.strip('"') for answer, letter in rows(LETTERS)}
    assert {answer: extract_mcq_answer(answer) for answer in expected} == expected
    ten = {"The answer is I": "I", "(I)": "I", "I think the answer is (J)": "J"}
    ten |= {"The answer is I think G": "", "I believe H": ""}
    assert {text: extract_mcq_answer(text, "ABCDEFGHIJ") for text in ten} == ten


def test_thinking_in_the_text():
    table = {
        "<think>\nhm\n</think>\n\n4": ("4", "hm"),
        "hm\n</think>\n\n4": ("4", "hm"),
        "<think>cut": ("", "cut"),
        "Hm.\n<think>a</think>\n<thinking>b</thinking>4": ("Hm.\n4", "a\nb"),
        "a <think> b": ("a <think> b", ""),
        "a <think> b </think> c": ("a <think> b </think> c", ""),
    }
    assert {text: split_thinking(text) for text in table} == table
    program = "def f(): return 1"
    drafted = f"<think>\n```python\ndef f(): return 2\n```\n</think>\n```python\n{program}\n```"
    assert extract_code_from_model(drafted, ["f"]) == program
    assert extract_code_from_model(drafted.partition("</think>")[0], ["f"]) is None


def test_long_answers_take_no_time():
    """Words that a pattern could divide in many ways, and a character at which it fails."""
    words = ("a", "apple ", "problem ", "a-a ", "m. ", "m^2 ", r"\text{m} ", "* ", "**", "\n", "是")
    places = ("#### 1{}& 7", "#### 5 {} 1", "#### {}| 18", "The answer is {}", "The answer{}x")
    for text in (place.format(word * 100) for word in words for place in places):
        started = time.process_time()
        evaluated("gsm8k", text, "18")
        extract_mcq_answer(text)
        compare_quickly(f"5 {text[4:]}", "18")
        assert time.process_time() - started < 1, text[:40]
