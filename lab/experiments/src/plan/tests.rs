use super::*;
use crate::catalog::Catalog;

fn around() -> Surroundings {
    Surroundings {
        cpus: vec![0, 1],
        devices: 8,
        kernel_devices: true,
        schedulers: ["none", "bfq", "kyber", "mq-deadline"].map(String::from).to_vec(),
        own_engine: true,
        own_devices: 8,
        ..Surroundings::default()
    }
}

fn planned(id: &str, scale: Scale, around: &Surroundings) -> PlannedExperiment {
    let catalog = Catalog::built_in();
    let definition = catalog.get(id).unwrap();
    make(&[definition], scale, Times::default(), around).unwrap().remove(0)
}

fn reasons(experiment: &PlannedExperiment) -> Vec<(String, String)> {
    let cells = experiment.cells.iter();
    cells.filter_map(|cell| Some((cell.series.clone(), cell.skipped.clone()?))).collect()
}

#[test]
fn every_experiment_can_be_planned_and_written() {
    let catalog = Catalog::built_in();
    let all: Vec<&Definition> = catalog.definitions().iter().collect();
    for scale in [Scale::Quick, Scale::Default, Scale::Paper] {
        let experiments = make(&all, scale, Times::default(), &around()).unwrap();
        assert_eq!(experiments.len(), all.len());
        for experiment in &experiments {
            let again = Definition::parse(&experiment.definition).unwrap();
            assert_eq!(Some(&again), catalog.get(&experiment.id), "{}", experiment.id);
        }
        let plan = crate::record::Plan { experiments, ..Default::default() };
        let text = toml::to_string(&plan).unwrap();
        assert_eq!(toml::from_str::<crate::record::Plan>(&text).unwrap(), plan);
    }
}

#[test]
fn the_quick_group_fits_into_three_minutes_on_two_cores() {
    let catalog = Catalog::built_in();
    let quick = catalog.select(&["quick".into()]).unwrap();
    let experiments = make(&quick, Scale::Quick, Times::default(), &around()).unwrap();
    let seconds = seconds(&experiments);
    assert!((30.0..140.0).contains(&seconds), "{seconds}");
}

#[test]
fn what_cannot_run_says_why() {
    let plain = around();
    let fig2 = reasons(&planned("cheops23.fig2", Scale::Default, &plain));
    assert_eq!(fig2.len(), 1, "{fig2:?}");
    assert!(fig2[0].0 == "iou-c" && fig2[0].1.contains("poll"));
    let polling = Surroundings { polls: true, ..around() };
    assert!(reasons(&planned("cheops23.fig2", Scale::Default, &polling)).is_empty());
    let fig6 = planned("cheops23.fig6", Scale::Default, &polling);
    let running: Vec<String> = fig6
        .cells
        .iter()
        .filter(|cell| cell.skipped.is_none())
        .map(|cell| format!("{} {}", cell.series, cell.parameters["jobs"]))
        .collect();
    // Two cores: two jobs of each, and one of iou-s, which needs two.
    assert_eq!(running.len(), 5 * 2 + 1, "{running:?}");
    for (around, said) in [
        (Surroundings { no_io_uring: Some("switched off".into()), ..polling.clone() }, "switched off"),
        (Surroundings { kernel_devices: false, ..polling.clone() }, "is the kernel's"),
        (
            Surroundings {
                schedulers: vec![],
                schedulers_missing: "a file has none".into(),
                ..polling.clone()
            },
            "a file has none",
        ),
        (Surroundings { schedulers: vec!["none".into()], ..polling.clone() }, "offer none, and not"),
    ] {
        let found = reasons(&planned("cheops23.table2", Scale::Default, &around));
        assert!(found.iter().any(|(_, reason)| reason.contains(said)), "{said}: {found:?}");
    }
    let guarded = Surroundings { read_only: Some("--destroy-data".into()), ..polling };
    let found = planned("icpe24.fig11d", Scale::Default, &guarded);
    let alone = found.cells.iter().filter(|cell| cell.skipped.is_none()).count();
    assert_eq!(alone, 4, "without background nothing is written");
    let fio = Surroundings { own_engine: false, ..around() };
    assert!(reasons(&planned("cheops23.fig2", Scale::Default, &fio)).iter().any(|(api, _)| api == "spdk"));
}

#[test]
fn fewer_devices_do_except_for_the_paper_and_for_figures_about_devices() {
    let one = Surroundings { devices: 1, polls: true, ..around() };
    let catalog = Catalog::built_in();
    for scale in [Scale::Quick, Scale::Default] {
        for definition in catalog.definitions() {
            for cell in planned(&definition.id, scale, &one).cells {
                let reason = cell.skipped.unwrap_or_default();
                assert!(
                    definition.varies("devices") || !reason.contains("devices"),
                    "{}: {reason}",
                    definition.id
                );
            }
        }
    }
    let isolation = planned("icpe24.fig11a", Scale::Quick, &one);
    assert!(
        isolation.scaled.iter().any(|note| note.contains("1 device instead of 8")),
        "{:?}",
        isolation.scaled
    );
    assert!(isolation.scaled.iter().any(|note| note == "2 cores instead of 10"), "{:?}", isolation.scaled);
    assert!(isolation.cells.iter().all(|cell| cell.notes.len() == 2), "{:?}", isolation.cells[0].notes);
    let devices = planned("icpe24.fig9", Scale::Default, &one);
    let fit = devices.cells.iter().filter(|cell| cell.skipped.is_none()).count();
    assert_eq!(fit, 4, "one device under each scheduler");
    let paper = reasons(&planned("icpe24.fig11a", Scale::Paper, &one));
    assert!(
        paper.iter().all(|(_, said)| said.starts_with("needs 8 devices; there is 1 (--paper")),
        "{paper:?}"
    );
    assert_eq!(paper.len(), planned("icpe24.fig11a", Scale::Paper, &one).cells.len());
}

#[test]
fn a_single_core_is_shared_and_that_is_said() {
    let one = Surroundings { cpus: vec![3], ..around() };
    let apart = planned("icpe24.table2", Scale::Quick, &one);
    assert!(apart.scaled.iter().any(|note| note.contains("1 core instead of 2: foreground and background")));
    let polling = planned("cheops23.fig2", Scale::Quick, &one);
    let cell = polling.cells.iter().find(|cell| cell.series == "iou-s").unwrap();
    assert_eq!(
        (cell.notes.as_slice(), &cell.skipped),
        (["1 core instead of 2".to_string()].as_slice(), &None)
    );
}

#[test]
fn the_published_times_are_kept_for_the_paper_alone() {
    let paper = planned("icpe24.fig11d", Scale::Paper, &around());
    assert_eq!((paper.cells[0].repetitions, paper.cells[0].seconds), (5, 720.0 + OVERHEAD_S));
    assert!(!paper.scaled.iter().any(|line| line.contains(" s after ")), "{:?}", paper.scaled);
    let quick = planned("icpe24.fig11d", Scale::Quick, &around());
    assert!(quick.scaled[0].contains("instead of 360 after 360"), "{:?}", quick.scaled);
    let catalog = Catalog::built_in();
    let times = Times { runtime_s: Some(2.0), ramp_s: Some(0.0), repetitions: Some(3) };
    let own = make(&[catalog.get("cheops23.fig2").unwrap()], Scale::Quick, times, &around()).unwrap();
    assert_eq!((own[0].cells[0].seconds, own[0].cells[0].repetitions), (2.0 + OVERHEAD_S, 3));
}
