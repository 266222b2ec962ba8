use lab_experiments::{ParameterValue, Verdict};

use super::*;
use crate::figure;

#[test]
fn printed_numbers_are_recomputed_from_the_raw_files() {
    let all = printed_numbers();
    let count = |agreement| all.iter().filter(|number| number.agreement == agreement).count();
    // The counts of the comparison in the reference data.
    assert_eq!(all.len(), 123);
    assert_eq!(
        count(Agreement::Differs),
        7,
        "{:#?}",
        all.iter().filter(|n| n.agreement == Agreement::Differs).collect::<Vec<_>>()
    );
    let growth = all.iter().find(|number| number.printed == 32.4).unwrap();
    assert_eq!((growth.agreement, growth.recomputed.round()), (Agreement::Differs, 320.0));
}

#[test]
fn every_study_lists_its_discrepancies() {
    let studies = ["cheops23", "icpe24", "spdk17"].map(String::from).into();
    let all = discrepancies(&studies);
    assert!(all.iter().filter(|one| one.study == "icpe24").count() >= 9);
    assert!(all.iter().filter(|one| one.study == "cheops23").count() >= 10);
    assert!(all.iter().all(|one| !one.text.is_empty() && !one.location.is_empty()));
    assert!(discrepancies(&BTreeSet::new()).is_empty());
}

#[test]
fn every_published_figure_is_drawn() {
    let catalog = ExperimentCatalog::built_in();
    let mut drawn = 0;
    for definition in catalog.definitions() {
        let records = published(&catalog, definition);
        let cells = group_into_cells(&records);
        let figure = figure::draw(definition, &[], &cells.iter().collect::<Vec<_>>(), true);
        let has_y = cells.iter().any(|cell| cell.median(&definition.role, &definition.y).is_some());
        if has_y {
            assert!(!figure.panels.is_empty(), "{} has no panel", definition.id);
            drawn += 1;
        }
        for chart in figure.panels.iter().flat_map(|panel| &panel.charts) {
            roxmltree::Document::parse(&chart.svg).unwrap();
        }
    }
    assert!(drawn > 25, "only {drawn} figures have published values");
}

#[test]
fn experiments_without_a_definition_are_drawn() {
    let mut run = RunDirectory::default();
    for depth in [1, 2, 4] {
        let mut record = CellRecord::new("mine.sweep", "a");
        record.parameters.insert("iodepth".into(), ParameterValue::from(depth));
        record.parameters.insert("jobs".into(), ParameterValue::from(1));
        record.role_mut("fg").set("iops", depth as f64);
        run.records.push(record);
    }
    let cells = group_into_cells(&run.records);
    let sections = group_by_experiment(&run, &cells);
    assert_eq!(sections.len(), 1);
    assert_eq!(sections[0].definition.x, "iodepth");
    let figure = figure::draw(&sections[0].definition, &sections[0].cells, &[], true);
    assert_eq!(figure.panels.len(), 1);
}

#[test]
fn findings_without_data_are_not_tested() {
    let run = RunDirectory::default();
    let results = FindingEvaluator::new(&run).findings();
    assert!(
        results
            .iter()
            .all(|result| result.verdict == Verdict::NotTested && result.remark.starts_with("not tested: "))
    );
    let count = |study: &str| results.iter().filter(|result| result.id.starts_with(study)).count();
    assert!(count("cheops23") >= 4 && count("icpe24") >= 28, "{} {}", count("cheops23"), count("icpe24"));
}
