use super::*;

fn directory(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("ringbolt-record-{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&path);
    path
}

fn record(iops: f64) -> CellRecord {
    let mut record = CellRecord::new("cheops23.fig5a", "iou");
    record.parameters.insert("iodepth".into(), Value::from(8));
    record.role_mut("fg").set("iops", iops);
    record.role_mut("fg").histograms.insert("clat".into(), vec![(1000, 3), (2000, 1)]);
    record
}

fn plan() -> Plan {
    Plan {
        schema: SCHEMA,
        scale: "quick".into(),
        experiments: vec![PlannedExperiment {
            id: "cheops23.fig5a".into(),
            definition: "id = \"cheops23.fig5a\"\n".into(),
            cells: vec![PlannedCell { series: "iou".into(), repetitions: 1, ..PlannedCell::default() }],
            ..PlannedExperiment::default()
        }],
        ..Plan::default()
    }
}

#[test]
fn a_run_is_read_as_it_was_written() {
    let path = directory("whole");
    let machine = Machine { schema: SCHEMA, distortions: vec!["turbo".into()], ..Machine::default() };
    let mut writer = RunWriter::create(&path, &machine, &plan()).unwrap();
    writer.store(&record(1.0)).unwrap();
    writer.store(&record(2.5)).unwrap();
    let run = Run::open(&path).unwrap();
    assert_eq!(run.machine, machine);
    assert_eq!(run.plan, plan());
    assert_eq!(run.records, vec![record(1.0), record(2.5)]);
    assert!(run.dropped.is_empty());
    assert!(RunWriter::create(&path, &machine, &plan()).is_err(), "a run is not written over");
    fs::remove_dir_all(&path).unwrap();
}

#[test]
fn a_line_that_was_cut_off_costs_that_line_only() {
    let path = directory("cut");
    let mut writer = RunWriter::create(&path, &Machine::default(), &plan()).unwrap();
    writer.store(&record(1.0)).unwrap();
    writer.store(&record(2.0)).unwrap();
    drop(writer);
    let results = path.join(RESULTS);
    let bytes = fs::read(&results).unwrap();
    for length in (0..bytes.len()).step_by(11).chain(bytes.len() - 2..bytes.len()) {
        fs::write(&results, &bytes[..length]).unwrap();
        let run = Run::open(&path).unwrap();
        let whole = bytes[..length].iter().filter(|byte| **byte == b'\n').count();
        // A line whose newline alone is missing is whole.
        assert!(run.records.len() == whole || run.records.len() == whole + 1);
        let mut writer = RunWriter::append(&path).unwrap();
        writer.store(&record(3.0)).unwrap();
        let after = Run::open(&path).unwrap();
        assert_eq!(after.records.last(), Some(&record(3.0)), "cut at {length}");
        assert_eq!(after.records.len(), run.records.len() + 1);
    }
    fs::remove_dir_all(&path).unwrap();
}

#[test]
fn a_newer_schema_is_refused() {
    let path = directory("newer");
    let mut writer = RunWriter::create(&path, &Machine::default(), &plan()).unwrap();
    let newer = CellRecord { schema: SCHEMA + 1, ..record(1.0) };
    writer.store(&newer).unwrap();
    assert!(matches!(Run::open(&path), Err(Error::Newer { .. })));
    fs::remove_dir_all(&path).unwrap();
}

#[test]
fn what_is_no_number_is_not_kept() {
    let mut role = RoleRecord::default();
    role.set("iops", f64::NAN);
    role.set("ipc", f64::INFINITY);
    assert!(role.metrics.is_empty());
}
