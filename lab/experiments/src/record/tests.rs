use super::*;

fn directory(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("ringbolt-record-{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&path);
    path
}

fn record(iops: f64) -> CellRecord {
    let mut record = CellRecord::new("cheops23.fig5a", "iou");
    record.parameters.insert("iodepth".into(), ParameterValue::from(8));
    record.role_mut("fg").set("iops", iops);
    record.role_mut("fg").histograms.insert("clat".into(), vec![(1000, 3), (2000, 1)]);
    record
}

fn plan() -> RunPlan {
    RunPlan {
        schema: SCHEMA,
        scale: "quick".into(),
        experiments: vec![PlannedExperiment {
            id: "cheops23.fig5a".into(),
            definition: "id = \"cheops23.fig5a\"\n".into(),
            cells: vec![PlannedCell { series: "iou".into(), repetitions: 1, ..PlannedCell::default() }],
            ..PlannedExperiment::default()
        }],
        ..RunPlan::default()
    }
}

#[test]
fn a_run_directory_round_trips() {
    let path = directory("whole");
    let machine =
        MachineRecord { schema: SCHEMA, distortions: vec!["turbo".into()], ..MachineRecord::default() };
    let mut writer = RunWriter::create(&path, &machine, &plan()).unwrap();
    writer.append(&record(1.0)).unwrap();
    writer.append(&record(2.5)).unwrap();
    let run = RunDirectory::open(&path).unwrap();
    assert_eq!(run.machine, machine);
    assert_eq!(run.plan, plan());
    assert_eq!(run.records, vec![record(1.0), record(2.5)]);
    assert!(run.dropped.is_empty());
    assert!(RunWriter::create(&path, &machine, &plan()).is_err(), "a run is not written over");
    fs::remove_dir_all(&path).unwrap();
}

#[test]
fn an_incomplete_line_loses_only_itself() {
    let path = directory("cut");
    let mut writer = RunWriter::create(&path, &MachineRecord::default(), &plan()).unwrap();
    writer.append(&record(1.0)).unwrap();
    writer.append(&record(2.0)).unwrap();
    drop(writer);
    let results = path.join(RESULTS);
    let bytes = fs::read(&results).unwrap();
    for length in (0..bytes.len()).step_by(11).chain(bytes.len() - 2..bytes.len()) {
        fs::write(&results, &bytes[..length]).unwrap();
        let run = RunDirectory::open(&path).unwrap();
        let whole = bytes[..length].iter().filter(|byte| **byte == b'\n').count();
        // A line that lacks only its newline is complete.
        assert!(run.records.len() == whole || run.records.len() == whole + 1);
        let mut writer = RunWriter::resume(&path).unwrap();
        writer.append(&record(3.0)).unwrap();
        let after = RunDirectory::open(&path).unwrap();
        assert_eq!(after.records.last(), Some(&record(3.0)), "cut at {length}");
        assert_eq!(after.records.len(), run.records.len() + 1);
    }
    fs::remove_dir_all(&path).unwrap();
}

#[test]
fn a_newer_schema_is_rejected() {
    let path = directory("newer");
    let mut writer = RunWriter::create(&path, &MachineRecord::default(), &plan()).unwrap();
    let newer = CellRecord { schema: SCHEMA + 1, ..record(1.0) };
    writer.append(&newer).unwrap();
    assert!(matches!(RunDirectory::open(&path), Err(RunDirectoryError::UnsupportedSchema { .. })));
    fs::remove_dir_all(&path).unwrap();
}

#[test]
fn infinities_and_nan_are_not_stored() {
    let mut role = RoleRecord::default();
    role.set("iops", f64::NAN);
    role.set("ipc", f64::INFINITY);
    assert!(role.metrics.is_empty());
}

#[test]
fn a_file_without_an_end_is_refused() {
    let error = read_bounded(Path::new("/dev/zero"), 1000).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
    let path = directory("bounded");
    fs::create_dir_all(&path).unwrap();
    fs::write(path.join("file"), [b'x'; 1000]).unwrap();
    assert_eq!(read_bounded(&path.join("file"), 1000).unwrap().len(), 1000);
    assert!(read_bounded(&path.join("file"), 999).is_err());
    fs::remove_dir_all(&path).unwrap();
}
