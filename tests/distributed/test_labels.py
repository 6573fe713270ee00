"""Labels that are missing or wrong, and models that differ, over ranks."""

import label_cases
import numpy as np


def test_labels_below_0_are_none_and_what_is_no_number_is_wrong(ranks):
    expected = -np.log(np.e / (np.e + 2))
    for loss, score, broken in ranks.run(2, label_cases.unlabelled):
        assert abs(loss - expected) < 1e-12
        assert score == 1
        assert broken == 0.5


def test_a_label_that_is_no_class_is_named(ranks):
    for said in ranks.run(2, label_cases.no_class):
        assert "labels holds 3 but logits has 3 classes" in said


def test_all_ranks_name_the_one_with_another_model(ranks):
    for said in ranks.run(3, label_cases.other_models):
        assert said.startswith("rank 1 has ((3, 4), 'torch.float32') as weight where rank 0 has")
