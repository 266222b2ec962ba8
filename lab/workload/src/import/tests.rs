//! fio's output in all formats, including published samples.

use std::path::PathBuf;

use super::*;

const TEXT: &str = "fio: warning about something\n\
fg: (g=0): rw=randread, bs=(R) 4096B-4096B, (W) 4096B-4096B, (T) 4096B-4096B, ioengine=libaio, iodepth=16\n\
fio-3.33\n\
fg: (groupid=2, jobs=3): err= 0: pid=7: Fri Nov 20 21:07:18 2026\n\
  read: IOPS=12.5k, BW=48.8MiB/s (51.2MB/s)(97.7MiB/2001msec)\n\
    slat (nsec): min=500, max=2000, avg=1000.00, stdev=1.0\n\
    clat (usec): min=34, max=3885.5k, avg=220.96, stdev=659.70\n\
     lat (usec): min=34, max=3885.6k, avg=221.96, stdev=659.71\n\
    clat percentiles (usec):\n\
     |  1.00th=[   51],  5.00th=[   55], 50.00th=[   75], 90.00th=[  221],\n\
     | 95.00th=[  807], 99.00th=[ 3982], 99.90th=[ 7439]\n\
   iops        : min= 1977, max= 2026, avg=2001.00, stdev=24.52, samples=3\n\
  lat (usec)   : 50=0.85%, 100=77.86%\n\
  cpu          : usr=27.80%, sys=1.35%, ctx=6245, majf=0, minf=37\n\
     latency   : target=0, window=0, percentile=100.00%, depth=16\n\
Run status group 0 (all jobs):\n   READ: bw=7990KiB/s\n";

#[test]
fn text_is_parsed_in_any_unit() {
    let rows = rows(TEXT).unwrap();
    let [row] = rows.as_slice() else { panic!("{rows:?}") };
    assert_eq!((row.jobname.as_str(), row.group, row.procs, row.qd), ("fg", 2, 3, 16));
    assert_eq!((row.rw.as_str(), row.engine.as_str(), row.bs_bytes), ("randread", "libaio", 4096));
    assert_eq!((row.iops, row.iops_sd), (12_500.0, 24.52));
    assert!((row.bw_mib_s - 48.8).abs() < 1e-9);
    assert_eq!((row.slat_mean_us, row.clat_mean_us, row.mean_us), (1.0, 220.96, 221.96));
    assert_eq!((row.max_us, row.sd_us, row.ctx), (3_885_500.0, 659.71, 6245));
    assert_eq!(row.percentiles_us, [75.0, 221.0, 807.0, 3982.0, 7439.0].map(Some));
    assert!((row.cpu_cores() - 0.8745).abs() < 1e-9);
}

#[test]
fn json_is_found_among_other_lines() {
    let json = "fio: direct IO is not possible\n{ not json\n{\"jobs\":[{\"jobname\":\"a,\\\"b\",\"read\":{\
        \"total_ios\":3,\"iops\":1.25,\"bw_bytes\":1048576,\"lat_ns\":{\"mean\":2000},\"clat_ns\":{\
        \"mean\":1500,\"max\":9000,\"percentile\":{\"99.000000\":3000}}},\"job options\":{\"iodepth\":\"4\"}}]}\n\
        fio: done\n";
    let found = rows(json).unwrap();
    assert_eq!((found.len(), found[0].qd, found[0].mean_us), (1, 4, 2.0));
    assert_eq!(found[0].percentiles_us, [None, None, None, Some(3.0), None]);
    let table = csv(&[("x.json".to_string(), found[0].clone())]);
    assert!(table.lines().nth(1).unwrap().starts_with("\"a,\"\"b\",0,read,,,4,1,4,"), "{table}");
    let object = &to_json(&[("x.json".to_string(), found[0].clone())])[0];
    assert_eq!((&object["p99_us"], &object["p50_us"]), (&serde_json::json!(3), &serde_json::Value::Null));
}

#[test]
fn a_job_that_failed_has_its_error_and_no_measured_values() {
    let measured = |row: &FioRow| {
        let first = COLUMNS.iter().position(|column| *column == "iops").unwrap();
        row.values()[first..COLUMNS.len() - 1].iter().filter(|value| !value.is_empty()).count()
    };
    let side = "{\"total_ios\":3,\"iops\":1.25,\"bw_bytes\":1048576,\"lat_ns\":{\"mean\":2000}}";
    let options = "\"job options\":{\"rw\":\"rw\",\"iodepth\":\"4\"}";
    let json = format!(
        "{{\"jobs\":[{{\"jobname\":\"a\",\"error\":42,\"read\":{side},\"write\":{side},{options}}},\
         {{\"jobname\":\"b\",\"error\":2,{options}}},{{\"jobname\":\"c\",\"error\":0,\"total_err\":7,\"read\":{side}}},\
         {{\"jobname\":\"d\",\"error\":0}}]}}"
    );
    let found = rows(&json).unwrap();
    let facts =
        |row: &FioRow| (row.jobname.clone(), row.job, row.direction.clone(), row.error, measured(row));
    let expected =
        [("a", 0, "read", 42, 0), ("a", 0, "write", 42, 0), ("b", 1, "", 2, 0), ("c", 2, "read", 0, 18)];
    let expected = expected.map(|(name, job, direction, error, count)| {
        (name.to_string(), job, direction.to_string(), error, count)
    });
    assert_eq!(found[..3].iter().map(facts).collect::<Vec<_>>(), expected[..3]);
    assert_eq!((found.len(), found[3].io_errors, found[3].error), (4, 7, 0));
    assert!(measured(&found[3]) > 10, "{:?}", found[3].values());
    let named: Vec<(String, FioRow)> = found.into_iter().map(|row| ("x.json".to_string(), row)).collect();
    let table = csv(&named);
    assert_eq!(table.lines().next().unwrap().split(',').nth(25), Some("error"));
    assert!(table.lines().nth(1).unwrap().ends_with(",42,x.json"), "{table}");
    let objects = to_json(&named);
    assert_eq!(
        (&objects[0]["error"], &objects[0]["iops"]),
        (&serde_json::json!(42), &serde_json::Value::Null)
    );
    assert_eq!((&objects[0]["rw"], &objects[0]["qd"]), (&serde_json::json!("rw"), &serde_json::json!(4)));
    // The same from text: a job that failed after its I/O, and one before.
    let failed = TEXT.replace("err= 0", "err=42 (file:x.c:1, func=f, error=No message)");
    let found = rows(&failed).unwrap();
    assert_eq!((found.len(), found[0].error, measured(&found[0])), (1, 42, 0));
    let header = "\na: (groupid=0, jobs=1): err= 2 (file:x.c:1, func=f, error=No such file): pid=1: now\n  cpu : usr=0.00%, sys=0.00%, ctx=0\n";
    for text in [format!("{TEXT}{header}"), format!("{header}{TEXT}")] {
        let found = rows(&text).unwrap();
        let early = found.iter().find(|row| row.jobname == "a").unwrap();
        assert_eq!((found.len(), early.error, early.direction.as_str(), measured(early)), (2, 2, "", 0));
        assert_ne!(found[0].job, found[1].job);
    }
}

#[test]
fn malformed_output_is_rejected_with_a_reason() {
    assert_eq!(rows("hello\n"), Err(ImportError::NoResults));
    assert_eq!(rows(""), Err(ImportError::NoResults));
    let cut = "{\n\"fio version\" : \"fio-3.35\", \"jobs\" : [ {";
    assert!(matches!(rows(cut), Err(ImportError::Json(_))));
    let bad = TEXT.replace("IOPS=12.5k", "IOPS=many");
    assert_eq!(rows(&bad).unwrap_err().to_string().split(" is").next(), Some("line 5"));
}

#[test]
fn truncated_output_never_panics() {
    for end in (0..TEXT.len()).filter(|end| TEXT.is_char_boundary(*end)) {
        let _ = rows(&TEXT[..end]);
        let _ = rows(&TEXT[end..]);
    }
}

/// The samples and tables of the published artifact, which are not part of this repository.
fn reference() -> Option<PathBuf> {
    let named = std::env::var_os("RINGBOLT_REFERENCE").map(PathBuf::from);
    let beside = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/reference");
    [named, Some(beside)].into_iter().flatten().find(|path| path.join("fio-samples").is_dir())
}

/// Lines of a simple CSV as maps from column to value.
fn table(path: &std::path::Path) -> Vec<std::collections::BTreeMap<String, String>> {
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines = text.lines();
    let columns: Vec<&str> = lines.next().unwrap().split(',').collect();
    let line = |line: &str| {
        let cells = line.split(',').map(str::to_string);
        columns.iter().map(|column| column.to_string()).zip(cells).collect()
    };
    lines.map(line).collect()
}

#[test]
fn published_outputs_give_the_published_tables() {
    let Some(reference) = reference() else {
        println!("SKIPPED: no reference data; RINGBOLT_REFERENCE names the directory with fio-samples/");
        return;
    };
    // The sample, and the table that holds its values.
    let cases = [
        ("01-read-512B-qd1-1dev", "fig01a"),
        ("02-read-4k-256jobs-grouped-bfq", "fig03"),
        ("03-read-4k-qd128-10jobs-8dev-kyber", "fig10"),
        ("04-spdk-read-4k-qd128-2jobs-1dev", "fig07"),
        ("05-spdk-read-4k-qd1024-6jobs-8dev", "fig01c"),
        ("06-fg-read-4k-qd1-with-32-writers-none", "fig11d"),
        ("07-bg-write-64k-qd128-of-32-none", "fig11d_procs"),
        ("10-fg-read-4k-qd128-starved-bfq", "fig12b"),
    ];
    let sample = |name: &str| {
        let path = reference.join("fio-samples").join(format!("{name}.json.txt"));
        rows(&std::fs::read_to_string(path).unwrap()).unwrap()
    };
    for (name, figure) in cases {
        let rows = sample(name);
        assert_eq!(rows.len(), 1, "{name}");
        let ours: Vec<(&str, String)> = COLUMNS.into_iter().zip(rows[0].values()).collect();
        let iops = &ours.iter().find(|(column, _)| *column == "iops").unwrap().1;
        let published = table(&reference.join("icpe24").join(format!("{figure}.csv")));
        let line = published.iter().find(|line| line["iops"] == *iops);
        let line = line.unwrap_or_else(|| panic!("{name}: no line of {figure} has {iops} IOPS"));
        let mut compared = 0;
        for (column, value) in &ours {
            let Some(wanted) = line.get(*column).filter(|_| *column != "engine") else { continue };
            assert_eq!(value, wanted, "{name}: {column}");
            compared += 1;
        }
        assert!(compared >= 12, "{name}: {compared} columns compared");
    }
    // A mixed job and two grouped jobs: both directions, against the tables of tokens.
    let mix = sample("09-randrw-50-50-one-job-kyber");
    let published = table(&reference.join("icpe24/table2.csv"));
    let kiops = |row: &FioRow| trimmed(&format!("{:.4}", row.iops / 1000.0));
    let line = published.iter().find(|line| line["read_kiops"] == kiops(&mix[0])).unwrap();
    assert_eq!((mix.len(), &line["write_kiops"]), (2, &kiops(&mix[1])));
    assert_eq!(line["write_p99_us"], mix[1].values()[18]);
    let pair = sample("08-two-jobs-grouped-read-qd1-write-qd128-kyber");
    let published = table(&reference.join("icpe24/table3_4.csv"));
    let line = published.iter().find(|line| line["read_kiops"] == kiops(&pair[0])).unwrap();
    assert_eq!((&line["write_kiops"], &line["read_p999_us"]), (&kiops(&pair[1]), &pair[0].values()[19]));
    for name in ["a-read-one-job", "b-fg-read-bg-write", "c-randrw-grouped-text-then-json"] {
        let path = reference.join("fio-samples/local-text").join(format!("{name}.txt"));
        let rows = rows(&std::fs::read_to_string(path).unwrap()).unwrap();
        assert!(
            rows.iter().all(|row| row.iops > 0.0 && row.mean_us > 0.0 && row.percentiles_us[3].is_some())
        );
        assert_eq!(rows.len(), if name.starts_with('a') { 1 } else { 2 }, "{name}");
    }
}

#[test]
fn many_lines_that_could_start_a_document_parse_in_linear_time() {
    // Each line may start a document if "fio version" follows; a search per line would take minutes.
    let text = "{\n".repeat(400_000) + "\"fio version\"";
    let began = std::time::Instant::now();
    assert!(matches!(rows(&text), Err(ImportError::Json(_))));
    assert!(began.elapsed().as_secs() < 60, "{:?}", began.elapsed());
}
