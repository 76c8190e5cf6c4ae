"""The page in a real browser: drawn, quiet, alone, escaped, narrow, dark, and without a mouse."""

import json
import re
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from playwright.sync_api import expect

from anybatch.app.report.page import write_page
from tests.app.report.run_folders import (
    HOSTILE,
    compare_folder,
    comparison_fields,
    plan_folder,
    proof_fields,
    run_fields,
    trace_fields,
    trace_folder,
    train_folder,
    training_events,
    verify_folder,
    window_event,
    write_json,
    write_lines,
)
from tests.browsing import violations

PATIENCE = 600_000
"""Milliseconds: a busy machine takes its time to draw."""
expect.set_options(timeout=PATIENCE)
FOLDERS = {
    "train": train_folder,
    "compare": compare_folder,
    "trace": trace_folder,
    "verify": verify_folder,
    "plan": plan_folder,
}


@dataclass
class Opened:
    """A page, what it said and what it asked for."""

    page: object
    complaints: list = field(default_factory=list)
    requests: list = field(default_factory=list)


@pytest.fixture(scope="module")
def opened(browser):
    """Opens a page from disk and waits until its charts are drawn, in a tab that was used before where there is one.

    A new tab takes longer than all else, a second of the processor and more. `is_kept` opens one that nobody else gets.
    """
    contexts, tabs = [], {}

    def new_tab(width, more):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme="light", **more)
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        views = []
        page = context.new_page()
        page.on("console", lambda message: views[-1].complaints.append(message.text))
        page.on("pageerror", lambda error: views[-1].complaints.append(str(error)))
        page.on("dialog", lambda dialog: (views[-1].complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: views[-1].requests.append(request.url))
        return page, views

    def opens(path, *, width=1200, is_kept=False, **more):
        key = (width, *sorted(more.items()), path if is_kept else None)
        if key not in tabs:
            tabs[key] = new_tab(width, more)
        page, views = tabs[key]
        views.append(Opened(page))
        page.emulate_media(color_scheme="light")
        page.goto(path.as_uri())
        if more.get("java_script_enabled", True):
            page.wait_for_selector("html[data-drawn]")
        return views[-1]

    yield opens
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """One page of each kind."""
    root = tmp_path_factory.mktemp("runs")
    return {kind: write_page(make(root / kind)) for kind, make in FOLDERS.items()}


@pytest.fixture(scope="module")
def opened_once(opened, pages):
    """A page of each kind, opened once: a new tab takes longer than all else. A test leaves it as it was."""
    views = {}

    def opens(kind):
        if kind not in views:
            views[kind] = opened(pages[kind], is_kept=True)
        return views[kind]

    return opens


@pytest.fixture
def shown(opened_once):
    """A page that is light again and has nothing in focus when the test begins."""

    def shows(kind):
        view = opened_once(kind)
        view.page.emulate_media(color_scheme="light")
        view.page.evaluate("document.activeElement.blur(), scrollTo(0, 0)")
        return view

    return shows


def overflow(page):
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def hostile_folders(root):
    """Every text of every file is markup."""
    fields = run_fields(
        task=HOSTILE,
        command=HOSTILE,
        git=HOSTILE,
        created=HOSTILE,
        settings={HOSTILE: HOSTILE, "optimizer": "</script><script>alert(3)</script>"},
        summary={"note": "--></style><script>alert(4)</script>"},
    )
    train = train_folder(root / "train")
    write_json(train / "run.json", fields)
    window = window_event()
    window["stages"][1]["stage"] = HOSTILE
    epoch = {"event": "epoch", "epoch": 1, "valid_loss": 1.0, "metrics": {HOSTILE: 0.5}}
    write_lines(train / "metrics.jsonl", [window, epoch, {**epoch, "epoch": 2}])

    compare = compare_folder(root / "compare")
    arms = comparison_fields() | {"metric": HOSTILE, "findings": [HOSTILE]}
    arms["arms"][0] |= {"name": HOSTILE, "description": HOSTILE}
    write_json(compare / "compare.json", arms)

    trace = trace_folder(root / "trace")
    traced = trace_fields()
    traced["stages"][0] |= {"stage": HOSTILE, "title": HOSTILE, "facts": {HOSTILE: HOSTILE}, "values": [HOSTILE]}
    traced["layers"][0] |= {"name": HOSTILE, "kind": HOSTILE, "values": [[HOSTILE]]}
    write_json(trace / "trace.json", traced)

    verify = verify_folder(root / "verify")
    proof = proof_fields(dtype=HOSTILE, notes=[HOSTILE])
    proof["causes"][0] |= {"kind": HOSTILE, "explanation": HOSTILE, "fix": HOSTILE}
    proof["cuts"][0] |= {"name": HOSTILE, "failure": HOSTILE}
    proof["cuts"][0]["parameters"][0]["name"] = HOSTILE
    write_json(verify / "verify.json", proof)

    plan = plan_folder(root / "plan")
    planned = {"sentences": [HOSTILE, "", HOSTILE], "unit": HOSTILE, "breakdown": {HOSTILE: 2**30}}
    write_json(plan / "plan.json", json.loads((plan / "plan.json").read_text()) | planned)
    return {"train": train, "compare": compare, "trace": trace, "verify": verify, "plan": plan}


@pytest.mark.parametrize("kind", FOLDERS)
def test_every_chart_is_drawn_without_a_complaint_and_without_a_request(shown, pages, kind):
    view = shown(kind)
    charts = view.page.locator("figure.chart")
    assert charts.count() > 0
    for index in range(charts.count()):
        drawn = charts.nth(index).locator("svg .trace path, svg .trace rect")
        assert drawn.count() > 0, charts.nth(index).get_attribute("id")
        assert drawn.first.bounding_box()["width"] > 0
    assert view.complaints == []
    assert view.requests == [pages[kind].as_uri()]


def test_the_lines_are_those_of_the_numbers(shown):
    page = shown("train").page
    lines = page.locator("#chart-epoch-loss .trace .line").evaluate_all(
        "lines => lines.map(line => line.getAttribute('d'))"
    )
    assert [len(re.findall("[ML]", line)) for line in lines] == [10, 10]
    heights = [float(y) for y in re.findall(r",([\d.]+)", lines[0])]
    losses = page.evaluate("JSON.parse(document.querySelector('#chart-epoch-loss script').textContent).data[0].y")
    scale = (heights[-1] - heights[0]) / (losses[-1] - losses[0])
    assert heights == pytest.approx([heights[0] + scale * (loss - losses[0]) for loss in losses], abs=0.1)
    assert scale < 0  # more is higher up
    assert page.locator("#chart-window .bar").count() == 23


def test_what_stays_the_same_is_drawn_above_zero_and_not_amid_numbers_that_it_never_has(opened, tmp_path):
    train_folder(tmp_path)
    steady = [event | {"lr": 0.1} if event["event"] == "update" else event for event in training_events()]
    write_lines(tmp_path / "metrics.jsonl", steady)
    page = opened(write_page(tmp_path)).page
    ticks = page.locator("#chart-learning-rate .tick.y").all_text_contents()
    assert [float(tick) for tick in ticks] == [0, 0.02, 0.04, 0.06, 0.08, 0.1]


def test_a_plan_has_round_gibibytes_on_its_axis(shown):
    page = shown("plan").page
    assert page.locator("#chart-peaks .tick.y").all_text_contents() == [f"{gib} GiB" for gib in (0, 2, 4, 6, 8)]


@pytest.mark.parametrize("kind", ["verify", "train", "plan"])
def test_a_key_of_the_legend_looks_as_its_line_is_drawn(shown, kind):
    page = shown(kind).page
    look = (
        "(one) => [one.tagName, ...['class', 'style', 'stroke-dasharray'].map((name) => one.getAttribute(name))].join()"
    )
    for chart in page.locator("figure.chart:has(.key)").all():
        for group, key in enumerate(chart.locator(".key").all()):
            drawn = chart.locator(f".trace[data-group='{group}'] :is(.line, .marks, .bar)").evaluate_all(
                f"all => all.map({look})"
            )
            swatch = key.locator(".swatch > *").evaluate_all(f"all => all.map({look})")
            if drawn[0].startswith("rect"):
                assert swatch[0].split(",")[2] == drawn[0].split(",")[2]
            else:
                assert swatch == drawn


@pytest.mark.parametrize("kind", FOLDERS)
def test_text_is_shown_as_it_is_and_never_run(opened, tmp_path, kind):
    view = opened(write_page(hostile_folders(tmp_path)[kind]))
    assert view.complaints == []
    assert all(url.startswith("file://") for url in view.requests)
    assert view.page.locator("img:not(.prediction img)").count() == 0
    shown = view.page.inner_text("body")
    assert "<script>alert(1)</script>" in shown
    if kind == "train":
        assert view.page.inner_text("h1") == HOSTILE
    if kind == "compare":
        view.page.focus("#chart-arms-metric .plot")
        view.page.keyboard.press("ArrowRight")
        expect(view.page.locator("#chart-arms-metric .readout")).to_contain_text("<script>alert(1)</script>")
        assert view.complaints == []


def test_the_page_forbids_itself_to_load_anything(opened, pages):
    view = opened(pages["trace"])
    blocked = view.page.evaluate(
        """() => new Promise((resolve) => {
            document.addEventListener("securitypolicyviolation", (event) => resolve(event.blockedURI));
            setTimeout(() => resolve("nothing was blocked"), 5000);
            const image = new Image(); image.src = "https://example.org/picture.png";
        })"""
    )
    assert blocked.startswith("https://example.org")


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_phone_needs_no_sideways_scrolling(opened, pages, kind):
    page = opened(pages[kind], width=375, is_mobile=True, has_touch=True).page
    assert overflow(page) == 0
    page.emulate_media(color_scheme="dark")
    assert overflow(page) == 0
    page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    assert overflow(page) == 0
    for box in page.locator("figure.chart svg.picture").all()[:3]:
        assert box.bounding_box()["width"] <= 375


def test_long_unbroken_words_do_not_widen_a_phone(opened, tmp_path):
    long = "x" * 300
    train_folder(tmp_path)
    write_json(tmp_path / "run.json", run_fields(task=long, command=long, settings={long: long}))
    assert overflow(opened(write_page(tmp_path), width=375).page) == 0


def test_charts_follow_the_scheme_when_it_changes(shown):
    page = shown("train").page

    def colours():
        line = page.locator("#chart-epoch-loss .trace .line").first.evaluate("(path) => getComputedStyle(path).stroke")
        text = page.locator("#chart-epoch-loss .tick.x").first.evaluate("(text) => getComputedStyle(text).fill")
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return line, text, paper

    light = colours()
    page.emulate_media(color_scheme="dark")
    expect(page.locator("#chart-epoch-loss .trace .line").first).to_have_css("stroke", "rgb(94, 180, 234)")
    dark = colours()
    assert all(before != after for before, after in zip(light, dark, strict=True))
    assert light[0] == "rgb(0, 114, 178)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_paper(shown, scheme):
    page = shown("train").page
    page.emulate_media(color_scheme=scheme)

    def luminance(name):
        text = (
            page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('{name}')").strip().lstrip("#")
        )
        parts = [int(text[place : place + 2], 16) / 255 for place in (0, 2, 4)]
        red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(one, other):
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    for paper in ("--paper", "--card"):
        assert contrast("--ink", paper) > 10
        assert contrast("--soft", paper) > 4.5  # WCAG AA for text
        assert contrast("--accent", paper) > 4.5
        for colour in range(1, 7):
            assert contrast(f"--series-{colour}", paper) > 3  # WCAG AA for graphics


def test_the_tab_key_reaches_every_control_in_order(opened, pages):
    page = opened(pages["train"]).page
    wanted = page.evaluate(
        "[...document.querySelectorAll('a, button, summary, .plot')].filter((one) => one.getClientRects().length).length"
    )
    reached = []
    for _ in range(wanted + 60):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("[document.activeElement.tagName, document.activeElement.className].join(' ')"))
        if reached[-1].startswith("BODY"):
            break
    assert reached[0] == "A skip"
    found = [one for one in reached if re.match(r"A|BUTTON|SUMMARY|DIV plot", one)]
    assert len(found) == wanted


def test_arrow_keys_read_a_chart_point_by_point(shown):
    page = shown("train").page
    page.focus("#chart-epoch-loss .plot")
    readout = page.locator("#chart-epoch-loss .readout")
    page.keyboard.press("ArrowRight")
    expect(readout).to_have_text("epoch 1: training loss 1.441, validation loss 1.525")
    page.keyboard.press("End")
    expect(readout).to_contain_text("epoch 10: training loss 0.1366")
    page.keyboard.press("ArrowLeft")
    expect(readout).to_contain_text("epoch 9:")
    expect(page.locator("#chart-epoch-loss .tip")).to_contain_text("epoch 9")
    assert page.locator("#chart-epoch-loss .cursor circle").count() == 2
    page.keyboard.press("Tab")
    expect(readout).to_have_text("")


def test_arrow_keys_walk_the_timeline_in_the_order_of_time(shown):
    page = shown("train").page
    page.focus("#chart-window .plot")
    readout = page.locator("#chart-window .readout")
    page.keyboard.press("ArrowRight")
    expect(readout).to_contain_text("update: zero")
    page.keyboard.press("ArrowRight")
    expect(readout).to_contain_text("micro-batch 0: load")


def test_a_proof_shows_errors_against_the_floor_and_says_why(shown):
    page = shown("verify").page
    expect(page.locator(".summary")).to_contain_text("digits is not exact: in 3 cuts, 64 rows of 128")
    expect(page.locator("#causes .findings")).to_contain_text("divides by tokens. Fix: Give units=tokens.")
    charts = page.locator("#proof figure.chart")
    assert charts.count() == 2
    drawing = charts.first.evaluate("figure => JSON.parse(figure.querySelector('script').textContent)")
    assert drawing["y"]["log"]
    expect(charts.first.locator(".drawing")).to_have_attribute("data-scale", "log")
    floor, *cuts = drawing["data"]
    assert [floor["name"], *(cut["name"] for cut in cuts)] == ["floor", "as configured: Rows(size=16)", "rows by 1"]
    assert cuts[0]["y"][0] < min(floor["y"])
    assert all(error > max(floor["y"]) for cut in cuts for error in cut["y"][1:])
    expect(charts.first).to_contain_text("3 parameters above the floor")
    table = page.locator("#proof .tables table")
    assert table.locator("tbody tr").count() == 6
    expect(page.locator("#proof .tables")).to_contain_text("in half failed: BatchError: no variance.")


def test_plus_and_zero_zoom_in_and_out(shown):
    page = shown("train").page
    edges = "document.querySelector('#chart-update-loss .drawing').dataset.x.split(' ')"
    span = f"(([low, high]) => high - low)({edges})"
    whole = page.evaluate(span)
    page.focus("#chart-update-loss .plot")
    page.keyboard.press("+")
    assert page.evaluate(span) == pytest.approx(whole / 2, rel=0.01)
    page.keyboard.press("0")
    assert page.evaluate(span) == pytest.approx(whole, rel=0.01)


def test_the_keys_of_the_legend_hide_and_show_a_line(shown):
    page = shown("compare").page
    lines = page.locator("#chart-arms-metric .trace")
    before = lines.count()
    key = page.locator("#chart-arms-metric button.key").first
    key.focus()
    page.keyboard.press("Enter")
    expect(key).to_have_attribute("aria-pressed", "false")
    expect(lines).to_have_count(before - 2)  # the mean and the band
    page.keyboard.press("Space")
    expect(lines).to_have_count(before)


def test_the_log_button_changes_the_axis_and_keeps_its_state_through_a_change_of_scheme(shown):
    page = shown("train").page
    kind = "document.querySelector('#chart-update-loss .drawing').dataset.scale"
    page.locator("#chart-update-loss button.log").press("Enter")
    assert page.evaluate(kind) == "log"
    page.emulate_media(color_scheme="dark")
    expect(page.locator("#chart-update-loss .trace .line").nth(1)).to_have_css("stroke", "rgb(94, 180, 234)")
    assert page.evaluate(kind) == "log"
    page.locator("#chart-update-loss button.log").press("Enter")
    assert page.evaluate(kind) == "linear"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", FOLDERS)
def test_axe_finds_no_violation(shown, kind, scheme):
    page = shown(kind).page
    page.emulate_media(color_scheme=scheme)
    assert [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in violations(page)] == []


def test_every_chart_has_a_text_alternative(shown):
    page = shown("compare").page
    for chart in page.locator("figure.chart").all():
        label = chart.locator(".plot").get_attribute("aria-label")
        assert "After the last epoch" in label
        chart.locator("summary").focus()
        page.keyboard.press("Enter")
        assert chart.locator("tbody tr").first.is_visible()


def test_without_scripts_the_numbers_are_still_there(opened, pages):
    page = opened(pages["train"], java_script_enabled=False).page
    assert "which is switched off here" in page.inner_text("main")
    assert page.locator("#chart-epoch-loss tbody tr").count() == 10


@pytest.mark.parametrize("kind", FOLDERS)
def test_names_are_unique_and_headings_do_not_skip_a_level(shown, kind):
    page = shown(kind).page
    names = page.evaluate(
        "[...document.querySelectorAll('[id]')].filter((one) => !one.closest('svg')).map((one) => one.id)"
    )
    assert len(names) == len(set(names))
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3, h4')].map((one) => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(levels))


def test_a_second_page_replaces_the_first_and_leaves_nothing_beside_it(tmp_path):
    train_folder(tmp_path)
    assert write_page(tmp_path) == write_page(tmp_path) == tmp_path / "report.html"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "report.html", "run.json"]


def test_the_page_has_no_link_to_fetch(tmp_path):
    html = write_page(train_folder(tmp_path)).read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=[\"']?(https?:)?//|@import|url\((?!#)", html)


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_page_is_small(pages, kind):
    assert pages[kind].stat().st_size <= 150 * 1024


def test_a_stretch_that_is_dragged_over_fills_the_chart_and_a_double_click_shows_all(shown):
    page = shown("train").page
    drawing = page.locator("#chart-update-loss .drawing")
    whole = drawing.get_attribute("data-x")
    drawing.scroll_into_view_if_needed()
    box = drawing.bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 100)
    expect(page.locator("#chart-update-loss .tip")).to_contain_text("update ")
    page.mouse.down()
    page.mouse.move(box["x"] + 400, box["y"] + 100)
    page.mouse.up()
    low, high = (float(edge) for edge in drawing.get_attribute("data-x").split())
    assert high - low < 60
    page.mouse.dblclick(box["x"] + 300, box["y"] + 100)
    assert drawing.get_attribute("data-x") == whole


def test_thirty_thousand_updates_make_a_page_of_less_than_three_hundred_kibibytes(opened, tmp_path):
    train_folder(tmp_path)
    write_lines(tmp_path / "metrics.jsonl", training_events(updates_per_epoch=3000))
    path = write_page(tmp_path)
    assert path.stat().st_size < 300 * 1024
    assert opened(path).complaints == []


def test_the_rows_of_an_update_are_cells_on_the_pages_of_training_and_of_a_trace(shown):
    for kind, cells in (("train", 64), ("trace", 32)):
        assert shown(kind).page.locator("#rows svg rect.right").count() == cells


def test_a_trace_ends_in_the_image_the_probabilities_and_the_label(shown):
    page = shown("trace").page
    size = page.locator(".prediction img").evaluate("image => [image.naturalWidth, image.naturalHeight]")
    assert size == [2, 3]
    assert page.locator(".prediction").inner_text().split("\n")[-1] == "13.0 %"
    assert page.get_by_text("class 0 (87.0%), label 0: right").is_visible()
