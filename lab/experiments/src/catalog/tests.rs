use super::*;
use crate::definition::Scale;
use crate::record::ParameterValue;

#[test]
fn every_definition_file_is_built_in() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("experiments");
    let mut there: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_string())
        .collect();
    there.sort();
    let mut known: Vec<String> = BUILT_IN.iter().map(|(name, _)| name.to_string()).collect();
    known.sort();
    assert_eq!(there, known);
    for (name, text) in BUILT_IN {
        assert_eq!(ExperimentDefinition::parse(text).unwrap().id, *name);
    }
}

#[test]
fn every_experiment_expands_at_every_scale() {
    let catalog = ExperimentCatalog::built_in();
    for definition in catalog.definitions() {
        let [quick, default, paper] =
            [Scale::Quick, Scale::Default, Scale::Paper].map(|scale| definition.cells(scale).unwrap());
        assert_eq!(default, paper, "{}", definition.id);
        assert!(quick.len() <= paper.len(), "{}", definition.id);
        assert_eq!(paper.is_empty(), !definition.derived_from.is_empty(), "{}", definition.id);
        let mut series: Vec<String> = paper.iter().map(|cell| definition.series_of(cell)).collect();
        series.dedup();
        assert!(series.iter().all(|name| !name.is_empty()), "{}", definition.id);
        for cell in &paper {
            for name in ["api", "block_bytes", "rw", "devices", "jobs", "iodepth", "cores"] {
                assert!(cell.contains_key(name), "{}: a cell lacks {name}: {cell:?}", definition.id);
            }
        }
    }
    // Counted by hand from the papers, to find mistakes in the lists.
    for (id, count) in [
        ("cheops23.fig2", 6),
        ("cheops23.fig5b", 5 * 8),
        ("cheops23.fig6", 5 * 20 + 10),
        ("cheops23.table2", 3 * 4),
        ("cheops23.fig8", 4 * (20 + 20 + 10)),
        ("icpe24.fig1a", 8 * 9),
        ("icpe24.fig1b", 4 * 9 + 2 * 9),
        ("icpe24.fig1c", 7 * 9 + 4 * 11),
        ("icpe24.fig3", 4 * 9),
        ("icpe24.fig8b", 4 * 7),
        ("icpe24.fig10", 5 * 15),
        ("icpe24.fig11a", 4 * 10),
        ("icpe24.fig11d", 4 * 7),
        ("icpe24.table2", 7),
        ("icpe24.table3", 6 * 5),
    ] {
        assert_eq!(catalog.get(id).unwrap().cells(Scale::Paper).unwrap().len(), count, "{id}");
    }
}

#[test]
fn groups_and_derived_experiments_select_their_sources() {
    let catalog = ExperimentCatalog::built_in();
    let ids = |names: &[&str]| -> Vec<String> {
        let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        catalog.select(&names).unwrap().iter().map(|definition| definition.id.clone()).collect()
    };
    assert_eq!(ids(&["icpe24.fig4a"]), ["icpe24.fig2", "icpe24.fig4a"]);
    assert_eq!(ids(&["cheops23"]).len(), 14);
    assert_eq!(ids(&["icpe24"]).len(), 28);
    assert_eq!(ids(&["spdk17"]).len(), 6);
    assert_eq!(ids(&["quick", "cheops23.fig2"]), QUICK);
    let invalid = catalog.select(&["icpe24.fig99".into()]).unwrap_err().to_string();
    assert!(invalid.contains("perhaps icpe24.fig9"), "{invalid}");
}

#[test]
fn every_check_names_existing_experiments_and_metrics() {
    let catalog = ExperimentCatalog::built_in();
    let known = include_str!("../../../../docs/LAB-SCHEMA.md");
    let mut checks: Vec<(String, crate::check::FindingCheck)> = Vec::new();
    for definition in catalog.definitions() {
        checks.extend(definition.check.iter().map(|check| (definition.id.clone(), check.clone())));
    }
    for finding in catalog.findings() {
        assert_eq!(finding.check.is_empty(), finding.not_tested.is_some(), "{}", finding.id);
        checks.extend(finding.check.iter().map(|check| (finding.id.clone(), check.clone())));
    }
    for (file, check) in checks {
        for pick in [Some(&check.of), check.against.as_ref()].into_iter().flatten() {
            let id = if pick.experiment.is_empty() { &file } else { &pick.experiment };
            let definition = catalog.get(id).unwrap_or_else(|| panic!("{file}: no {id}"));
            assert!(definition.derived_from.is_empty(), "{file}: {id} has no records of its own");
            let generic = ["clat_p99_us", "lat_mean_us", "lat_p99_us", "target_cpu_ns_per_io"];
            let named = known.contains(&format!("`{}`", pick.metric));
            let share = pick.metric.starts_with("share_");
            assert!(named || share || generic.contains(&pick.metric.as_str()), "{file}: {}", pick.metric);
            for (name, value) in &pick.filter {
                let cells = definition.cells(Scale::Paper).unwrap();
                let has = |value: &ParameterValue| {
                    cells.iter().any(|cell| cell.get(name).is_some_and(|found| found.same(value)))
                };
                let texts = value.as_str().map(|text| text.trim_start_matches('!').split('|'));
                let there = texts.map_or(has(value), |mut texts| texts.all(|text| has(&text.into())));
                assert!(there, "{file}: no cell of {id} has {name} {value}");
            }
        }
        assert!(check.at_least.is_some() || check.at_most.is_some(), "{file}: a check without a bound");
    }
}

#[test]
fn every_study_has_experiments() {
    let catalog = ExperimentCatalog::built_in();
    assert_eq!(catalog.study_findings("cheops23").count(), 4);
    assert_eq!(catalog.study_findings("spdk17").count(), 5);
    // The names of the paper, all of them and in its order.
    let names: Vec<&str> = catalog.study_findings("icpe24").map(|finding| finding.id.as_str()).collect();
    let expected: Vec<String> = (1..=5)
        .map(|number| format!("icpe24.KF-{number}"))
        .chain((1..=23).map(|number| format!("icpe24.O-{number}")))
        .collect();
    assert_eq!(names, expected);
}

#[test]
fn a_user_definition_is_added_or_rejected_with_a_reason() {
    let folder = std::env::temp_dir().join(format!("ringbolt-catalog-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let good = BUILT_IN[0].1.replace("cheops23.fig2", "mine.fig2");
    fs::write(folder.join("good.toml"), good).unwrap();
    let mut catalog = ExperimentCatalog::built_in();
    assert_eq!(catalog.add_directory(&folder).unwrap(), 1);
    assert_eq!(catalog.select(&["mine".into()]).unwrap()[0].id, "mine.fig2");
    fs::write(folder.join("bad.toml"), "id = 1").unwrap();
    let error = catalog.add_directory(&folder).unwrap_err().to_string();
    assert!(error.contains("bad.toml"), "{error}");
    assert_eq!(catalog.add_directory(Path::new("/nowhere")).unwrap(), 0);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn edit_distance_counts_changed_letters() {
    for (left, right, apart) in
        [("", "", 0), ("fig2", "fig2", 0), ("fig2", "fig3", 1), ("quick", "quik", 1), ("a", "xyz", 3)]
    {
        assert_eq!(edit_distance(left, right), apart);
    }
}

/// One line for each check: claim, computation, bound, published number, requirement and source.
fn table_of_checks(catalog: &ExperimentCatalog) -> String {
    let query = |query: &crate::check::MetricQuery, id: &str| {
        let experiment = if query.experiment.is_empty() { id } else { &query.experiment };
        let mut filter: Vec<String> =
            // A bar would end the column.
            query.filter.iter().map(|(name, value)| format!("{name} {value}").replace('|', " or ")).collect();
        filter.extend((query.role != "fg").then(|| format!("role {}", query.role)));
        let take = toml::Value::try_from(query.take).unwrap();
        let take = match take.as_str().unwrap() {
            "mean" => String::new(),
            take if query.along.is_empty() => format!("{take} "),
            take => format!("{take} along {} of ", query.along),
        };
        let filter = if filter.is_empty() { String::new() } else { format!(" ({})", filter.join(", ")) };
        format!("{take}`{}` {experiment}{filter}", query.metric)
    };
    let mut text = String::new();
    let mut add = |id: &str, says: &str, source: &str, checks: &[crate::check::FindingCheck]| {
        text.push_str(&format!("\n## {id}\n{says} ({source})\n\n"));
        if checks.is_empty() {
            return;
        }
        text.push_str("| claim | computation | bound | published |\n| --- | --- | --- | --- |\n");
        for check in checks {
            let of = query(&check.of, id);
            let relation = toml::Value::try_from(check.relation).unwrap();
            let computation = match (&check.against, relation.as_str().unwrap()) {
                (None, _) => of,
                (Some(against), "ratio") => format!("{of} / {}", query(against, id)),
                (Some(against), "gain-pct") => format!("gain in % of {of} over {}", query(against, id)),
                (Some(against), "loss-pct") => format!("loss in % of {of} against {}", query(against, id)),
                (Some(against), _) => format!("{of} - {}", query(against, id)),
            };
            let each = match check.for_each.is_empty() {
                true => String::new(),
                false => format!(", for each {}", check.for_each.join(", ")),
            };
            let needs = check.needs.as_ref().map_or(String::new(), |needs| format!("; needs {needs}"));
            let published = check.published.map_or("–".to_string(), |value| value.to_string());
            let bound = check.evaluate(id, &[], crate::check::Precision::Exact).bound;
            text.push_str(&format!(
                "| {} | {computation}{each} | {bound}{needs} | {published} |\n",
                check.says
            ));
        }
    };
    for finding in catalog.findings() {
        let says = match &finding.not_tested {
            Some(reason) => format!("{} Not tested: {reason}.", finding.says),
            None => finding.says.clone(),
        };
        add(&finding.id, &says, &format!("section {}", finding.section), &finding.check);
    }
    for definition in catalog.definitions().iter().filter(|definition| !definition.check.is_empty()) {
        let source = format!("section {}", definition.section);
        add(&definition.id, &format!("{}.", definition.title), &source, &definition.check);
    }
    text
}

#[test]
fn the_documented_table_of_checks_is_that_of_the_program() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/FINDINGS.md");
    let head = "# Findings and checks\n\
        What each check claims, what it computes, and where the paper says it. Written by\n\
        `UPDATE_DOCS=1 cargo test -p ringbolt-lab-experiments table_of_checks` from the files in `lab/experiments`.\n\n\
        A computation is a metric of an experiment's cells with the parameters in brackets; `max`, `min`, `knee` and so on\n\
        are those of [LAB.md](LAB.md). Bounds are looser than the published numbers: they ask for the shape of a result, on\n\
        other hardware. The first part has the findings under the names of their papers, the second the figures and tables.\n";
    let expected = format!("{head}{}", table_of_checks(&ExperimentCatalog::built_in()));
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, &expected).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap();
    assert!(found == expected, "docs/FINDINGS.md is out of date: its first lines say how to write it");
}
