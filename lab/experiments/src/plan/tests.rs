use super::*;
use crate::catalog::ExperimentCatalog;

fn capabilities() -> MachineCapabilities {
    MachineCapabilities {
        cpus: vec![0, 1],
        devices: 8,
        kernel_devices: true,
        schedulers: ["none", "bfq", "kyber", "mq-deadline"].map(String::from).to_vec(),
        bdev_engine: true,
        bdev_devices_max: 8,
        ..MachineCapabilities::default()
    }
}

fn planned(id: &str, scale: Scale, capabilities: &MachineCapabilities) -> PlannedExperiment {
    let catalog = ExperimentCatalog::built_in();
    let definition = catalog.get(id).unwrap();
    plan_experiments(&[definition], scale, TimeOverrides::default(), capabilities).unwrap().remove(0)
}

fn reasons(experiment: &PlannedExperiment) -> Vec<(String, String)> {
    let cells = experiment.cells.iter();
    cells.filter_map(|cell| Some((cell.series.clone(), cell.skipped.clone()?))).collect()
}

#[test]
fn every_plan_round_trips_through_toml() {
    let catalog = ExperimentCatalog::built_in();
    let all: Vec<&ExperimentDefinition> = catalog.definitions().iter().collect();
    for scale in [Scale::Quick, Scale::Default, Scale::Paper] {
        let experiments = plan_experiments(&all, scale, TimeOverrides::default(), &capabilities()).unwrap();
        assert_eq!(experiments.len(), all.len());
        for experiment in &experiments {
            let again = ExperimentDefinition::parse(&experiment.definition).unwrap();
            assert_eq!(Some(&again), catalog.get(&experiment.id), "{}", experiment.id);
        }
        let plan = crate::record::RunPlan { experiments, ..Default::default() };
        let text = toml::to_string(&plan).unwrap();
        assert_eq!(toml::from_str::<crate::record::RunPlan>(&text).unwrap(), plan);
    }
}

#[test]
fn the_quick_group_fits_into_three_minutes_on_two_cores() {
    let catalog = ExperimentCatalog::built_in();
    let quick = catalog.select(&["quick".into()]).unwrap();
    let experiments =
        plan_experiments(&quick, Scale::Quick, TimeOverrides::default(), &capabilities()).unwrap();
    let seconds = seconds(&experiments);
    assert!((30.0..140.0).contains(&seconds), "{seconds}");
}

#[test]
fn cells_that_cannot_run_have_a_reason() {
    let sanitize = capabilities();
    let fig2 = reasons(&planned("cheops23.fig2", Scale::Default, &sanitize));
    assert_eq!(fig2.len(), 1, "{fig2:?}");
    assert!(fig2[0].0 == "iou-c" && fig2[0].1.contains("poll"));
    let polling = MachineCapabilities { polled_io: true, ..capabilities() };
    assert!(reasons(&planned("cheops23.fig2", Scale::Default, &polling)).is_empty());
    let fig6 = planned("cheops23.fig6", Scale::Default, &polling);
    let running: Vec<String> = fig6
        .cells
        .iter()
        .filter(|cell| cell.skipped.is_none())
        .map(|cell| format!("{} {}", cell.series, cell.parameters["jobs"]))
        .collect();
    // Two cores suffice for two jobs of each API, and for one of iou-s, which needs two cores per job.
    assert_eq!(running.len(), 5 * 2 + 1, "{running:?}");
    for (capabilities, message) in [
        (
            MachineCapabilities { io_uring_unavailable: Some("disabled".into()), ..polling.clone() },
            "disabled",
        ),
        (MachineCapabilities { kernel_devices: false, ..polling.clone() }, "is a kernel API"),
        (
            MachineCapabilities {
                schedulers: vec![],
                schedulers_unavailable: "a file has none".into(),
                ..polling.clone()
            },
            "a file has none",
        ),
        (MachineCapabilities { schedulers: vec!["none".into()], ..polling.clone() }, "offer none, not"),
    ] {
        let found = reasons(&planned("cheops23.table2", Scale::Default, &capabilities));
        assert!(found.iter().any(|(_, reason)| reason.contains(message)), "{message}: {found:?}");
    }
    let guarded = MachineCapabilities { read_only: Some("--destroy-data".into()), ..polling };
    let found = planned("icpe24.fig11d", Scale::Default, &guarded);
    let alone = found.cells.iter().filter(|cell| cell.skipped.is_none()).count();
    assert_eq!(alone, 4, "without background nothing is written");
    let fio = MachineCapabilities { bdev_engine: false, ..capabilities() };
    assert!(reasons(&planned("cheops23.fig2", Scale::Default, &fio)).iter().any(|(api, _)| api == "spdk"));
}

#[test]
fn cells_use_fewer_devices_except_with_paper_and_where_devices_vary() {
    let one = MachineCapabilities { devices: 1, polled_io: true, ..capabilities() };
    let catalog = ExperimentCatalog::built_in();
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
        paper.iter().all(|(_, message)| message.starts_with("needs 8 devices; there is 1 (--paper")),
        "{paper:?}"
    );
    assert_eq!(paper.len(), planned("icpe24.fig11a", Scale::Paper, &one).cells.len());
}

#[test]
fn sharing_one_core_is_noted() {
    let one = MachineCapabilities { cpus: vec![3], ..capabilities() };
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
fn stand_ins_are_planned_with_a_reason() {
    let reasons = |id: &str, capabilities: &MachineCapabilities| -> Vec<(String, String)> {
        let cells = planned(id, Scale::Default, capabilities).cells;
        cells.into_iter().filter_map(|cell| Some((cell.series, cell.stand_in?))).collect()
    };
    let polling = MachineCapabilities { polled_io: true, ..capabilities() };
    let kernel = reasons("cheops23.fig2", &polling);
    assert_eq!(kernel.len(), 1, "{kernel:?}");
    assert!(kernel[0].0 == "spdk" && kernel[0].1.contains("block layer stands in for SPDK"), "{kernel:?}");
    let one = MachineCapabilities { cpus: vec![0], ..polling.clone() };
    let shared = reasons("cheops23.fig2", &one);
    assert!(
        shared.contains(&("iou-s".into(), "iou-s: 2 polling threads on 1 of the study's 2 cores".into())),
        "{shared:?}"
    );
    let driver = MachineCapabilities { user_space_driver: true, kernel_devices: false, ..polling };
    assert_eq!(reasons("cheops23.fig2", &driver), []);
    // The study had ten cores. Two jobs have a core each here; more do not.
    let scaling = planned("icpe24.fig1c", Scale::Default, &driver).cells;
    for cell in scaling.iter().filter(|cell| cell.series.starts_with("spdk") && cell.skipped.is_none()) {
        let jobs = cell.parameters["jobs"].as_f64().unwrap();
        assert_eq!(cell.stand_in.is_some(), jobs > 2.0, "{cell:?}");
    }
}

#[test]
fn only_paper_uses_the_published_durations() {
    let paper = planned("icpe24.fig11d", Scale::Paper, &capabilities());
    assert_eq!((paper.cells[0].repetitions, paper.cells[0].seconds), (5, 720.0 + OVERHEAD_S));
    assert!(!paper.scaled.iter().any(|line| line.contains(" s after ")), "{:?}", paper.scaled);
    let quick = planned("icpe24.fig11d", Scale::Quick, &capabilities());
    assert!(quick.scaled[0].contains("instead of 360 after 360"), "{:?}", quick.scaled);
    let catalog = ExperimentCatalog::built_in();
    let times = TimeOverrides { runtime_s: Some(2.0), ramp_s: Some(0.0), repetitions: Some(3) };
    let own =
        plan_experiments(&[catalog.get("cheops23.fig2").unwrap()], Scale::Quick, times, &capabilities())
            .unwrap();
    assert_eq!((own[0].cells[0].seconds, own[0].cells[0].repetitions), (2.0 + OVERHEAD_S, 3));
}
