"""What the benchmarks claim and no noise can change; the table of exactness is tested in benchmarks/."""

import xml.etree.ElementTree

import pytest

from anybatch import Cost
from anybatch.ragged.cheapest_cut import best_cut
from benchmarks import batchnorm, coupled, peak, pictures, texts
from tests.processes.forked import run_module


def test_peak_memory_does_not_grow_with_the_number_of_micro_batches():
    measured = peak.convolutional(counts=(1, 2, 64))
    assert measured[64] <= 1.01 * measured[1]
    assert measured[64] <= 1.001 * measured[2]


def test_the_gradients_are_all_that_accumulation_adds():
    measured = peak.transformer(counts=(1, 2, 8))
    assert measured[8] <= 1.001 * measured[2]
    assert measured[2] <= 1.15 * measured[1]


@pytest.mark.parametrize(
    ("law", "largest"), [("log-normal 1.0", 1 / 3), ("bimodal", 0.4), ("stdlib", 1), ("constant", 1)]
)
def test_the_cut_wastes_at_most_5_percent_and_stays_far_below_the_budget(law, largest):
    samples = texts.draw(law, 128, seed=0)
    lengths = [len(sample["input_ids"]) for sample in samples]
    cut = best_cut(lengths, 8 * max(lengths), Cost(), slack=0.01)
    assert cut.padded_tokens <= 1.05 * sum(lengths)
    assert cut.largest <= largest * 8 * max(lengths)


def test_the_picture_holds_every_case_and_contender():
    result = {"speedup": 2.85, "waste": 0.03, "peak_bytes": 2**20}
    picture = pictures.ragged_picture({"log-normal, batch 128": {"date": "today", "anybatch Tokens": result}})
    assert "log-normal, batch 128" in picture
    assert "2.85 x, 3% padding, 1 MB" in picture
    assert xml.etree.ElementTree.fromstring(picture).tag.endswith("svg")


def test_exact_batch_norm_is_exact_in_a_fraction_of_the_memory_and_plain_accumulation_is_wrong():
    walked = batchnorm.walk(rows=32)
    assert walked.error("exact, offload to disk") < 1e-12
    assert walked.memory("exact, offload to disk") < 0.35
    assert walked.memory("exact, nothing offloaded") > 0.9
    assert walked.error("plain accumulation (micro)") > 0.2


def test_a_coupled_loss_is_exact_in_a_fraction_of_the_memory_and_plain_accumulation_is_wrong():
    walked = coupled.walk(rows=32)
    assert walked.error("anybatch Coupled") < 1e-13
    assert walked.memory("anybatch Coupled") < 0.5
    assert walked.error("plain accumulation") > 1e-2


def test_the_picture_of_two_ranks_has_a_bar_for_each_way():
    ways = {"DDP, synchronised per micro-batch": {"ratio": 1.0}, "anybatch Update": {"ratio": 0.5}}
    drawn = pictures.ranks_picture({"some model": ways}, {"kept": {"ratio": 0.7, "peak_bytes": 2**20}})
    bars = xml.etree.ElementTree.fromstring(drawn).findall("{http://www.w3.org/2000/svg}rect")
    assert [float(bar.attrib["width"]) for bar in bars[1:]] == [400.0, 200.0, 280.0]


def test_the_golden_record_of_a_tree_is_met_again_and_another_seed_is_named_as_different(tmp_path):
    few = ["--record", str(tmp_path / "golden.json"), "--only", "rows", "refusal: micro_batch=0"]
    assert run_module("benchmarks.golden", "--write", *few).returncode == 0
    again = run_module("benchmarks.golden", "--check", *few)
    assert (again.returncode, again.stdout) == (0, "2 scenarios, 0 differences\n")
    other = run_module("benchmarks.golden", "--check", "--seed", "1", *few)
    assert other.returncode == 1
    assert "rows: weights differs" in other.stdout
    assert "refusal: micro_batch=0: messages differs" not in other.stdout
