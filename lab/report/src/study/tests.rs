use experiments::Value;

use super::*;
use crate::figure;

#[test]
fn printed_numbers_are_checked_against_the_files() {
    let all = printed();
    let count = |agreement| all.iter().filter(|number| number.agreement == agreement).count();
    // As the reference data's own comparison counts them.
    assert_eq!(all.len(), 123);
    assert_eq!(
        count(Agreement::Apart),
        7,
        "{:#?}",
        all.iter().filter(|n| n.agreement == Agreement::Apart).collect::<Vec<_>>()
    );
    let growth = all.iter().find(|number| number.printed == 32.4).unwrap();
    assert_eq!((growth.agreement, growth.raw.round()), (Agreement::Apart, 320.0));
}

#[test]
fn every_study_says_where_it_disagrees() {
    let studies = ["cheops23", "icpe24", "spdk17"].map(String::from).into();
    let all = disagreements(&studies);
    assert!(all.iter().filter(|one| one.study == "icpe24").count() >= 9);
    assert!(all.iter().filter(|one| one.study == "cheops23").count() >= 10);
    assert!(all.iter().all(|one| !one.text.is_empty() && !one.place.is_empty()));
    assert!(disagreements(&BTreeSet::new()).is_empty());
}

#[test]
fn every_published_figure_is_drawn() {
    let catalog = Catalog::built_in();
    let mut drawn = 0;
    for definition in catalog.definitions() {
        let records = published(&catalog, definition);
        let cells = cells(&records);
        let figure = figure::draw(definition, &[], &cells.iter().collect::<Vec<_>>(), true);
        let has_y = cells.iter().any(|cell| cell.median(&definition.role, &definition.y).is_some());
        if has_y {
            assert!(!figure.panels.is_empty(), "{} shows nothing", definition.id);
            drawn += 1;
        }
        for chart in figure.panels.iter().flat_map(|panel| &panel.charts) {
            roxmltree::Document::parse(&chart.svg).unwrap();
        }
    }
    assert!(drawn > 25, "only {drawn} figures have published values");
}

#[test]
fn what_no_plan_knows_is_drawn_all_the_same() {
    let mut run = Run::default();
    for depth in [1, 2, 4] {
        let mut record = CellRecord::new("mine.sweep", "a");
        record.parameters.insert("iodepth".into(), Value::from(depth));
        record.parameters.insert("jobs".into(), Value::from(1));
        record.role_mut("fg").set("iops", depth as f64);
        run.records.push(record);
    }
    let cells = cells(&run.records);
    let sections = sections(&run, &cells);
    assert_eq!(sections.len(), 1);
    assert_eq!(sections[0].definition.x, "iodepth");
    let figure = figure::draw(&sections[0].definition, &sections[0].cells, &[], true);
    assert_eq!(figure.panels.len(), 1);
}

#[test]
fn findings_are_asked_of_each_repetition() {
    let run = Run::default();
    let asked = Asking::of(&run).findings();
    assert!(asked.iter().all(|asked| asked.outcome.verdict == Verdict::NotTested && asked.repetitions == 0));
    let of = |study: &str| asked.iter().filter(|asked| asked.outcome.id.starts_with(study)).count();
    assert!(of("cheops23") >= 4 && of("icpe24") >= 28, "{} {}", of("cheops23"), of("icpe24"));
}
