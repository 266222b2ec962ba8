use super::*;

const SAMPLE: &str = "
id = 't.fig1'
title = 'a sample'
x = 'iodepth'
y = 'iops'
series = ['scheduler']
[fixed]
api = 'iou'
jobs = 1
[vary]
iodepth = [1, 2, 4]
scheduler = ['none', 'bfq']
[quick]
iodepth = [4]
[[also]]
fixed = { api = 'spdk' }
vary = { iodepth = [1, 8] }
[[rule]]
where = { scheduler = 'bfq' }
keep = { iodepth = [1, 4] }
[[rule]]
where = { api = 'spdk', iodepth = 8 }
set = { jobs = 2 }
";

fn text(cells: &[CellParameters]) -> Vec<String> {
    let word = |cell: &CellParameters| {
        let words: Vec<String> = cell.values().map(ParameterValue::to_string).collect();
        words.join(" ")
    };
    cells.iter().map(word).collect()
}

#[test]
fn varied_parameters_and_rules_expand_to_cells() {
    let sample = ExperimentDefinition::parse(SAMPLE).unwrap();
    let cells = sample.cells(Scale::Default).unwrap();
    // Columns: api, iodepth, jobs, scheduler. The scheduler changes slowest.
    assert_eq!(
        text(&cells),
        [
            "iou 1 1 none",
            "iou 2 1 none",
            "iou 4 1 none",
            "iou 1 1 bfq",
            "iou 4 1 bfq",
            "spdk 1 1",
            "spdk 8 2"
        ]
    );
    let quick = sample.cells(Scale::Quick).unwrap();
    assert_eq!(text(&quick), ["iou 4 1 none", "iou 4 1 bfq", "spdk 1 1", "spdk 8 2"]);
    assert_eq!(sample.series_of(&cells[3]), "bfq");
    assert_eq!(sample.series_of(&cells[5]), "spdk");
}

#[test]
fn rows_are_combined_with_varied_parameters() {
    let text_of =
        SAMPLE.replace("x = 'iodepth'", "x = 'iodepth'\nrows = [{ a = 1, b = 2 }, { a = 3, b = 4 }]");
    let definition = ExperimentDefinition::parse(&text_of).unwrap();
    assert_eq!(definition.cells(Scale::Quick).unwrap().len(), 2 * 2 + 2);
}

#[test]
fn a_definition_round_trips_through_toml() {
    let sample = ExperimentDefinition::parse(SAMPLE).unwrap();
    let again = ExperimentDefinition::parse(&toml::to_string(&sample).unwrap()).unwrap();
    assert_eq!(again, sample);
}

#[test]
fn an_invalid_definition_is_rejected_with_a_reason() {
    for (from, to, message) in [
        ("x = 'iodepth'", "x = 'iodepth'\nnonsense = 1", "nonsense"),
        ("id = 't.fig1'", "id = '../x'", "letters"),
        ("series = ['scheduler']", "series = []", "series"),
        ("x = 'iodepth'", "x = 'iodepth'\nmeasure = ['weather']", "weather"),
        (
            "iodepth = [4]",
            "iodepth = []\nscheduler = []\n[time]\nruntime_s = 1\nramp_s = 1\nrepetitions = 0",
            "repetition",
        ),
        ("x = 'iodepth'", "", "x"),
        ("title = 'a sample'", "title = 'a sample'\nderived_from = ['t.fig0']", "derived"),
    ] {
        let wrong = SAMPLE.replacen(from, to, 1);
        let error = ExperimentDefinition::parse(&wrong).unwrap_err();
        assert!(error.contains(message), "{to}: {error}");
    }
    let many: Vec<String> = (0..200).map(|n| n.to_string()).collect();
    let list = many.join(",");
    let wrong = SAMPLE.replace("iodepth = [1, 2, 4]", &format!("iodepth = [{list}]\njobs = [{list}]"));
    assert!(ExperimentDefinition::parse(&wrong).unwrap_err().contains("too many"));
}
