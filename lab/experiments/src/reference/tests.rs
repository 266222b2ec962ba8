use super::*;
use crate::catalog::ExperimentCatalog;
use crate::check::{Precision, Verdict};

fn all_published() -> Vec<CellRecord> {
    let catalog = ExperimentCatalog::built_in();
    catalog.definitions().iter().flat_map(published).collect()
}

#[test]
fn every_check_and_finding_holds_for_the_published_data() {
    let catalog = ExperimentCatalog::built_in();
    let records = all_published();
    let (mut tested, mut wrong) = (0, Vec::new());
    for definition in catalog.definitions() {
        for check in &definition.check {
            let outcome = check.evaluate(&definition.id, &records, Precision::Exact);
            tested += usize::from(outcome.verdict != Verdict::NotTested);
            if outcome.verdict == Verdict::DoesNotHold {
                wrong.push(format!("{}: {outcome:?}", definition.id));
            }
        }
    }
    for finding in catalog.findings() {
        let outcome = finding.evaluate(&records, Precision::Exact);
        tested += usize::from(outcome.verdict != Verdict::NotTested);
        if outcome.verdict == Verdict::DoesNotHold {
            wrong.push(format!("{outcome:?}"));
        }
        // O-13 has no figure and no published file.
        if finding.id.starts_with("icpe24") && finding.id != "icpe24.O-13" {
            assert_eq!(outcome.verdict, Verdict::Holds, "{outcome:?}");
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(tested > 90, "{tested}");
}

#[test]
fn published_values_of_checks_match_the_data() {
    let catalog = ExperimentCatalog::built_in();
    let records = all_published();
    let mut compared = 0;
    let in_icpe = catalog.definitions().iter().filter(|definition| definition.study() == "icpe24");
    let own = in_icpe
        .flat_map(|definition| definition.check.iter().map(|check| (definition.id.clone(), check.clone())));
    let findings = catalog
        .study_findings("icpe24")
        .flat_map(|f| f.check.iter().map(|check| (f.id.clone(), check.clone())));
    for (location, check) in own.chain(findings) {
        let outcome = check.evaluate(&location, &records, Precision::Exact);
        let (Some(measured), Some(published)) = (outcome.measured, check.published) else { continue };
        let low = outcome.range.map_or(measured, |range| range.0);
        let high = outcome.range.map_or(measured, |range| range.1);
        // Printed figures are rounded.
        let near =
            published >= low - 0.05 * low.abs() - 0.006 && published <= high + 0.05 * high.abs() + 0.006;
        assert!(near, "{location}: {}: published {published}, data {low} to {high}", check.says);
        compared += 1;
    }
    assert!(compared > 60, "{compared}");
}

#[test]
fn tables_match_the_numbers_of_the_paper() {
    // Numbers for which text and raw files of the paper agree.
    for (name, fits, column, expected) in [
        ("fig02", vec![("scheduler", "bfq"), ("qd", "256")], "p99_us", 1155.1),
        ("fig03", vec![("scheduler", "none"), ("procs", "256")], "p99_us", 3883.0),
        ("fig05", vec![("scheduler", "kyber"), ("procs", "256")], "p99_us", 1073.2),
        ("fig07", vec![("scheduler", "none"), ("procs", "3")], "iops", 785_700.0),
        (
            "fig08",
            vec![("experiment", "fig08a"), ("scheduler", "bfq"), ("procs", "10")],
            "lock_pct_script_symbols",
            78.0,
        ),
        ("fig09", vec![("scheduler", "bfq"), ("devices", "8")], "iops", 1_255_000.0),
        ("fig10", vec![("scheduler", "none"), ("procs", "10")], "iops", 3_417_000.0),
        ("fig11d", vec![("scheduler", "none"), ("bg_procs", "32")], "p99_us", 404_800.0),
        ("fig12b", vec![("scheduler", "bfq"), ("bg_procs", "32")], "iops", 1165.0),
        (
            "table2_summary",
            vec![("workload", "separate"), ("r_lat_us", "0"), ("w_lat_us", "10000")],
            "read_kiops_mean",
            189.4,
        ),
    ] {
        let rows = table("icpe24", name).unwrap();
        let fitting: Vec<_> = rows.iter().filter(|row| fits.iter().all(|(c, v)| row[*c] == *v)).collect();
        assert_eq!(fitting.len(), 1, "{name} {fits:?}");
        let value: f64 = fitting[0][column].parse().unwrap();
        assert!((value / expected - 1.0).abs() < 0.002, "{name} {fits:?}: {value} is not {expected}");
    }
}

#[test]
fn every_table_is_complete() {
    for (study, name, text) in TABLES {
        let rows = table(study, name).unwrap();
        let columns = text.lines().next().unwrap().split(',').count();
        assert_eq!(rows.len(), text.lines().count() - 1, "{name}");
        for line in text.lines() {
            assert_eq!(line.split(',').count(), columns, "{name}: {line}");
        }
    }
    assert!(table("icpe24", "nothing").is_none());
}

#[test]
fn published_cells_are_cells_of_a_run() {
    let catalog = ExperimentCatalog::built_in();
    for definition in catalog.definitions().iter().filter(|definition| !definition.reference.is_empty()) {
        let cells = definition.cells(crate::definition::Scale::Paper).unwrap();
        let records = published(definition);
        assert!(!records.is_empty(), "{}", definition.id);
        let mut known = 0;
        for record in &records {
            assert!(!record.series.is_empty(), "{}", definition.id);
            known +=
                usize::from(cells.iter().any(|cell| crate::definition::matches(cell, &record.parameters)));
        }
        // The raw files contain some runs that no figure shows.
        assert!(known * 10 >= records.len() * 7, "{}: {known} of {}", definition.id, records.len());
    }
}

#[test]
fn the_facts_are_toml() {
    for (study, text) in FACTS {
        let facts: toml::Table = toml::from_str(text).unwrap();
        assert_eq!(facts["paper"]["id"].as_str(), Some(study));
        assert!(facts["stated"].as_array().is_some_and(|stated| !stated.is_empty()));
    }
    let cheops: toml::Table = toml::from_str(FACTS[0].1).unwrap();
    let table2 = cheops["table2_kiops"].as_table().unwrap();
    let catalog = ExperimentCatalog::built_in();
    for record in published(catalog.get("cheops23.table2").unwrap()) {
        let [api, scheduler] = ["api", "scheduler"].map(|name| record.parameters[name].as_str().unwrap());
        let printed = table2[api][scheduler].as_float().unwrap();
        assert_eq!(record.metric("fg", "iops"), Some(printed * 1000.0), "{api} {scheduler}");
    }
}
