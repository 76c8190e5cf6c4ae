"""The nine pages in a browser: every claim read off, every item settled, alone, by keyboard, for every eye."""

import json
import re
from datetime import UTC, datetime, timedelta

import pytest

from anybatch.app.cli.main import run
from anybatch.app.lessons.pages.lesson_content import ORDER, all_lessons, memory_table, read_lesson
from anybatch.app.lessons.pages.lesson_page import learn_page, write_learn_site
from anybatch.errors import LessonError
from tests.app.lessons.claims import measured
from tests.app.lessons.measures import OF_A_RUN, SHOWN
from tests.browsing import violations

ITEMS = {
    *(f"P{n}" for n in range(1, 12)),
    *(f"D{n}" for n in range(1, 32)),
    *(f"E{n}" for n in range(1, 7)),
    *(f"C{n}" for n in range(1, 13)),
}
CLAIMS = [(lesson.name, name) for lesson in all_lessons() for name in lesson.claims]


@pytest.fixture(scope="module")
def learn_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("learn") / "learn.html"
    path.write_text(learn_page(), encoding="utf-8")
    return path


class Opened:
    def __init__(self, page, complaints, requests):
        self.page, self.complaints, self.requests = page, complaints, requests


@pytest.fixture(scope="module")
def new_tab(browser, learn_file):
    """Opens a tab with the page of all nine."""
    contexts = []

    def opens(*, width=1000, **more):
        context = browser.new_context(viewport={"width": width, "height": 800}, **more)
        contexts.append(context)
        page = context.new_page()
        found = Opened(page, [], [])
        page.on("console", lambda message: found.complaints.append(message.text))
        page.on("pageerror", lambda error: found.complaints.append(str(error)))
        page.on("request", lambda request: found.requests.append(request.url))
        page.goto(learn_file.as_uri())
        return found

    yield opens
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def one_tab(new_tab):
    return new_tab().page


@pytest.fixture
def opened(one_tab, learn_file):
    """Opens a lesson as one who was never here: a new tab for each would take longer than all else."""

    def opens(name="trace", *, state=""):
        one_tab.evaluate("localStorage.clear()")
        one_tab.goto("about:blank")
        one_tab.goto(f"{learn_file.as_uri()}#{name}{state}")
        one_tab.wait_for_selector(f"article#{name}[data-settled]", timeout=600_000)
        return one_tab

    return opens


def going(view):
    """One view that goes from lesson to lesson."""

    def shows(name):
        view.page.goto(view.page.url.split("#")[0] + f"#{name}")
        view.page.wait_for_selector(f"article#{name}[data-settled]:not([hidden])", timeout=600_000)
        return view

    return shows


@pytest.fixture(scope="module")
def lesson_view(new_tab):
    return going(new_tab())


@pytest.fixture(scope="module")
def narrow_view(new_tab):
    return going(new_tab(width=375))


def test_every_numbered_item_is_settled_by_some_page():
    settled = {item for lesson in all_lessons() for item in lesson.answers}
    assert settled == ITEMS


def test_an_item_that_no_page_settles_would_be_seen():
    settled = {item for lesson in all_lessons() if lesson.name != "write" for item in lesson.answers}
    assert {"E1", "E2", "E3", "E4", "E5"} == ITEMS - settled


@pytest.mark.parametrize(("lesson", "name"), CLAIMS)
def test_torch_measures_what_the_claim_says(engine, lesson, name):
    claim = read_lesson(lesson).claims[name]
    assert measured(engine, claim.measure, dict(claim.setting)) == claim.shown


@pytest.mark.parametrize("name", ORDER)
def test_every_claim_stands_on_the_rendered_page_and_the_page_measures_the_same(lesson_view, name):
    page, lesson = lesson_view(name).page, read_lesson(name)
    text = page.evaluate(f"""() => {{
        const article = document.getElementById("{name}");
        const texts = (value) => typeof value === "string" ? [value]
            : value && typeof value === "object" ? Object.values(value).flatMap(texts) : [];
        const specs = [...article.querySelectorAll("[data-spec]")].map((figure) => JSON.parse(figure.dataset.spec));
        const inner = specs.flatMap(texts).join(" ");
        const marks = new DOMParser().parseFromString(article.innerHTML + inner, "text/html").querySelectorAll("[data-claim]");
        return [...marks].map((mark) => [mark.dataset.claim, mark.textContent]);
    }}""")
    static = re.findall(r'data-claim="(\w+)" value="[^"]*">([^<]*)<', _article(name))
    assert {claim for claim, _ in [*text, *static]} == set(lesson.claims)
    for claim, shown in [*text, *static]:
        assert shown == lesson.claims[claim].shown
    for claim, fields in lesson.claims.items():
        if fields.measure in OF_A_RUN:
            value = page.evaluate(
                "([name, setting]) => anybatch.measure(name, setting)", [fields.measure, fields.setting]
            )
            assert SHOWN[fields.measure](value) == fields.shown, claim


def _article(name):
    return re.search(rf'<article class="lesson" id="{name}".*?</article>', learn_page(), re.DOTALL)[0]


def test_the_table_of_memory_is_that_of_plan(capsys):
    run(["plan", "stdlib", "--memory", "64MiB", "--json"])
    planned = json.loads(capsys.readouterr().out)
    peaks = {size["size"]: size["peak"] for size in planned["sizes"]}
    for size in memory_table()["sizes"]:
        assert peaks[size["size"]] == pytest.approx(size["peak"], rel=0.02)
    fixed = sum(planned["breakdown"][part] for part in ("parameters", "gradients", "optimizer"))
    assert memory_table()["fixed"] == pytest.approx(fixed, rel=0.02)
    assert memory_table()["whole"] == planned["whole_size"]


@pytest.mark.parametrize("name", ORDER)
def test_a_page_runs_without_a_complaint_and_asks_for_nothing(lesson_view, name):
    view = lesson_view(name)
    alive = view.page.locator(f"#{name} [data-widget][data-alive]").count()
    assert alive == view.page.locator(f"#{name} [data-widget]").count() > 0
    assert view.complaints == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in view.requests)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ORDER)
def test_axe_finds_no_violation(lesson_view, name, scheme):
    page = lesson_view(name).page
    page.emulate_media(color_scheme=scheme)
    told = [(rule["id"], [node["html"][:160] for node in rule["nodes"][:3]]) for rule in violations(page)]
    page.emulate_media(color_scheme="light")
    assert told == []


def test_axe_would_have_seen_a_picture_without_words(lesson_view):
    page = lesson_view("rows").page
    page.evaluate("document.querySelector('#rows svg.cells').removeAttribute('aria-label')")
    assert [rule["id"] for rule in violations(page)] == ["svg-img-alt"]
    page.evaluate("document.querySelector('#rows svg.cells').setAttribute('aria-label', 'rows')")


@pytest.mark.parametrize("name", ORDER)
def test_nothing_scrolls_sideways_on_a_narrow_screen(narrow_view, name):
    page = narrow_view(name).page
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0


def test_all_nine_read_without_scripts(new_tab):
    page = new_tab(java_script_enabled=False).page
    assert page.locator("article.lesson:visible").count() == 9
    text = page.locator("main").inner_text()
    for lesson in all_lessons():
        assert lesson.title in text
    assert "752 of 1,000 rows never count" in text


def test_the_size_of_all_nine_is_kept():
    assert len(learn_page().encode()) <= 250 * 1024


def test_a_break_rewrites_the_verdict_and_the_address_and_a_link_restores_it(opened):
    page = opened("rows")
    bench = page.locator("#rows .bench")
    assert "Exact" in bench.locator(".verdict").inner_text()
    bench.get_by_label("zero before every micro-batch").check()
    assert "752 of 1,000 rows never count" in bench.locator(".verdict").inner_text()
    assert "752 never" in bench.locator("svg.cells").get_attribute("aria-label")
    state = page.url.split("#rows")[1]
    again = opened("rows", state=state)
    assert "752 of 1,000 rows never count" in again.locator("#rows .bench .verdict").inner_text()


def test_breaks_that_exclude_each_other_are_not_made_together_and_a_line_that_is_gone_is_struck_through(opened):
    bench = opened("rows").locator("#rows .bench")
    bench.get_by_label("zero before every micro-batch").check()
    bench.get_by_label("never zero").check()
    assert not bench.get_by_label("zero before every micro-batch").is_checked()
    assert bench.locator(".listing del").all_inner_texts() == ["optimizer.zero_grad()"]


def test_a_tail_that_leaks_is_told_from_one_that_is_lost(opened):
    bench = opened("rows").locator("#rows .bench")
    bench.get_by_label("no step for the tail; zero only after steps").check()
    assert "40 of 1,000 rows miss their own batch" in bench.locator(".verdict").inner_text()
    bench.get_by_label("no step for the tail; zero at the start of an epoch").check()
    assert "40 of 1,000 rows never count" in bench.locator(".verdict").inner_text()


def test_the_gradient_of_a_micro_batch_is_shown_before_it_is_added(opened):
    stepper = opened("trace").locator("#trace .stepper")
    bars = []
    for _ in range(11):
        stepper.get_by_role("button", name="Next", exact=True).click()
        bars.append(
            (stepper.locator(".stages .now").text_content(), stepper.locator(".gradbars code").all_inner_texts())
        )
    backward, accumulate = bars[-2:]
    assert (backward[0], accumulate[0]) == ("backward", "accumulate")
    assert backward[1] == bars[-3][1] != accumulate[1]


def test_the_reader_commits_before_the_answer_is_shown(opened):
    page = opened("zero")
    question = page.locator("#zero .predict").first
    assert question.locator(".reveal").inner_text() == ""
    question.get_by_role("button").first.click()
    assert "No: 752 of 1,000" in question.locator(".reveal").inner_text()


def test_the_stepper_walks_through_one_update(opened):
    page = opened("trace")
    stepper = page.locator("#trace .stepper")
    seen = []
    for _ in range(23):
        stepper.get_by_role("button", name="Next", exact=True).click()
        seen.append(stepper.locator(".stages .now").text_content())
    micro = ["load", "forward", "loss", "backward", "accumulate"]
    assert seen[0] == "zero"
    assert seen[1:] == micro * 4 + ["step", "zero"]
    assert "no row is in the sum" in stepper.inner_text()


def test_the_parsons_problem_is_solved_by_keyboard_alone(opened):
    page = opened("write")
    here = "[...document.querySelectorAll('#write .parsons .lines .line')].indexOf(document.activeElement)"
    for _ in range(40):  # from the top of the page to the first line
        page.keyboard.press("Tab")
        if page.evaluate(here) == 0:
            break
    assert page.evaluate(here) == 0

    def move(text, to, depth, nth=0):
        lines = page.locator("#write .parsons .lines .line")
        texts = [lines.nth(k).inner_text() for k in range(lines.count())]
        at = [k for k, each in enumerate(texts) if each == text][nth]
        for _ in range(abs(at - (before := page.evaluate(here)))):
            page.keyboard.press("Tab" if at > before else "Shift+Tab")
        assert page.evaluate(here) == at
        for _ in range(abs(to - at)):
            page.keyboard.press("ArrowUp" if to < at else "ArrowDown")
        for _ in range(depth):
            page.keyboard.press("ArrowRight")

    move("optimizer.zero_grad()", 0, 0)
    move("for epoch in range(epochs):", 1, 0)
    move("for i, (x, y) in enumerate(loader):", 2, 1)
    move("loss = criterion(model(x), y)", 3, 2)
    move("(loss * share(i)).backward()", 4, 2)
    move("if (i + 1) % N == 0 or i + 1 == len(loader):", 5, 2)
    move("optimizer.step()", 6, 3)
    move("optimizer.zero_grad()", 7, 3, nth=1)
    page.keyboard.press(" ")
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Run it":
            break
    page.keyboard.press("Enter")
    assert page.locator("#write .parsons .verdict").inner_text().startswith("Solved.")


def test_a_wrong_arrangement_is_told_what_python_says(opened):
    page = opened("write")
    page.locator("#write .parsons .run").first.click()
    assert "IndentationError" in page.locator("#write .parsons .verdict").inner_text()


def test_a_wrong_answer_gets_its_experiment(opened):
    page = opened("recall")
    page.locator("#recall .quiz").get_by_role("button", name="before each backward", exact=True).click()
    assert "752 of 1,000 rows never count" in page.locator("#recall .quiz").inner_text()


def test_cards_come_back_when_the_package_fsrs_says(opened):
    from fsrs import Card, Rating, Scheduler

    page = opened("recall")
    scheduler, start = Scheduler(enable_fuzzing=False), datetime(2026, 1, 1, tzinfo=UTC)
    histories = [
        [(3, 0), (3, 10), (3, 3000), (4, 40000), (1, 90000), (3, 90010), (2, 95000)],
        [(1, 0), (2, 1), (3, 6), (3, 16), (1, 2000), (1, 2010), (4, 2030), (3, 60000)],
        [(4, 0), (2, 20000), (3, 20100), (3, 120000), (4, 300000)],
        [(2, 0), (2, 6), (3, 12), (4, 5000), (1, 5001), (2, 5011), (3, 5026)],
    ]
    for history in histories:
        card, reviews, expected = Card(), [], []
        for rating, minutes in history:
            card, _ = scheduler.review_card(card, Rating(rating), start + timedelta(minutes=minutes))
            reviews.append([rating, minutes * 60_000])
            expected.append([card.stability, card.difficulty, (card.due - start).total_seconds() * 1000])
        found = page.evaluate(
            """async (reviews) => {
                const { newCard, review } = await import("ab/fsrs");
                let card = newCard();
                return reviews.map(([rating, now]) => {
                    card = review(card, rating, now);
                    return [card.stability, card.difficulty, card.due];
                });
            }""",
            reviews,
        )
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-12)


def test_a_card_that_was_known_is_kept_for_later_in_this_browser(opened):
    page = opened("recall")
    cards = page.locator("#recall .cards")
    first = cards.locator(".question").inner_text()
    cards.get_by_role("button", name="show it").click()
    cards.get_by_role("button", name="Easy").click()
    assert cards.locator(".question").inner_text() != first
    page.reload()
    page.wait_for_selector("article#recall[data-settled]", timeout=600_000)
    assert "13 of 14 cards are due" in page.locator("#recall .cards").inner_text()


def test_the_numbers_of_cards_vary_and_are_right(opened):
    page = opened("recall")
    cards = next(part for part in read_lesson("recall").parts if part.kind == "cards").spec["cards"]
    for card in cards:
        texts = page.evaluate(
            """async (card) => {
                const { filled } = await import("ab/cards");
                return [0, 0.4, 0.99].map((u) => filled(card, () => u));
            }""",
            card,
        )
        assert not any("[" in text["front"] + text["back"] for text in texts)
        assert (len({text["front"] for text in texts}) > 1) == ("draw" in card)
    early = next(card for card in cards if card["id"] == "early")
    back = page.evaluate(
        """async (card) => {
            const { filled } = await import("ab/cards"), drawn = [0, 0.99, 0.4];
            return filled(card, () => drawn.shift());
        }""",
        early,
    )
    assert "1,000 rows, 4 micro-batches of 16" in back["front"]
    assert back["back"].startswith("752")


def test_fp16_on_the_number_line_is_torchs(opened):
    import torch

    page = opened("limits")
    values = [s * m * 10.0**e for e in range(-10, 6) for m in (1.0, 1.7, 3.3, 6.1) for s in (1, -1)] + [
        2**-25,
        65519.0,
        65520.0,
    ]
    found = page.evaluate(
        "async (values) => { const { fp16 } = await import('ab/scaler'); return values.map((v) => String(fp16(v))); }",
        values,
    )
    expected = torch.tensor(values, dtype=torch.float64).half().double().tolist()
    assert [float(text.replace("Infinity", "inf")) for text in found] == expected


def test_one_lesson_is_a_page_of_its_own(tmp_path):
    page = learn_page("units")
    assert page.count("<article") == 1
    assert "anybatch learn zero" in page
    with pytest.raises(LessonError, match=r"there is no lesson 'unit'.*trace, zero, rows, units"):
        learn_page("unit")


def test_the_site_has_a_file_per_lesson_and_the_scripts_once(tmp_path):
    first = write_learn_site(tmp_path / "site")
    assert first.name == "index.html"
    assert {path.stem for path in first.parent.glob("*.html")} == {"index", *ORDER}
    assert (first.parent / "web/engine/run.js").exists()
    assert "data:text/javascript" not in (first.parent / "units.html").read_text()


def test_the_printed_cheat_sheet_is_there_and_controls_are_not(opened):
    page = opened("recall")
    page.emulate_media(media="print")
    assert page.locator("#recall .sheet").is_visible()
    assert not page.locator("header.top").is_visible()
    page.emulate_media(media="null")  # none: what is printed has its own


@pytest.mark.parametrize("paper", ["A4", "Letter"])
def test_the_cheat_sheet_is_one_printed_side(opened, paper):
    page = opened("recall")
    alone = "#recall > *:not(:has(.cheat)), article:not(#recall) { display: none !important }"
    sides = {}
    for name, style in (("sheet", alone), ("page", "")):
        tag = page.add_style_tag(content=f"@media print {{ {style} }}")
        sides[name] = len(re.findall(rb"/Type\s*/Page[^s]", page.pdf(format=paper)))
        tag.evaluate("tag => tag.remove()")
    assert sides["sheet"] == 1
    assert sides["page"] > 1  # pages are counted
