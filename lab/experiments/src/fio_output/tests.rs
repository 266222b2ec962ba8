use super::*;

/// Shortened output of fio 3.33 for a group of two readers and one of a writer.
const FIO: &str = r#"fio: a warning
{ "fio version" : "fio-3.33", "jobs" : [
 { "jobname" : "bg", "groupid" : 0, "error" : 0, "job_runtime" : 1000, "usr_cpu" : 5.0, "sys_cpu" : 20.0, "ctx" : 50,
   "read" : { "total_ios" : 0, "iops" : 0.0, "bw_bytes" : 0, "lat_ns" : { "N" : 0, "mean" : 0.0 } },
   "write" : { "total_ios" : 10, "iops" : 10.0, "bw_bytes" : 40960, "clat_ns" : { "N" : 10, "mean" : 2000.0, "max" : 9000 },
     "lat_ns" : { "N" : 10, "mean" : 2500.0, "max" : 9500 } } },
 { "jobname" : "fg", "groupid" : 1, "error" : 0, "job_runtime" : 2000, "usr_cpu" : 30.0, "sys_cpu" : 60.0, "ctx" : 4000,
   "read" : { "total_ios" : 4000, "iops" : 4000.0, "bw_bytes" : 16777216, "iops_stddev" : 12.5,
     "slat_ns" : { "N" : 4000, "mean" : 300.0 },
     "clat_ns" : { "N" : 4000, "mean" : 70000.0, "stddev" : 5000.0, "max" : 90000,
        "percentile" : { "50.000000" : 66048, "99.000000" : 77312 },
        "bins" : { "66048" : 3000, "77312" : 1000, "80000" : 0 } },
     "lat_ns" : { "N" : 4000, "mean" : 70300.0, "max" : 90300 } },
   "write" : { "total_ios" : 0 } } ] }"#;

#[test]
fn fio_results_are_parsed_by_role() {
    let jobs = |name: &str| if name == "fg" { 2 } else { 1 };
    let (version, groups) = parse(FIO, jobs).unwrap();
    assert_eq!(version, "fio-3.33");
    let names: Vec<&str> = groups.iter().map(|group| group.name.as_str()).collect();
    assert_eq!(names, ["bg", "fg"]);
    let fg = &groups[1].record.metrics;
    for (name, value) in [
        ("iops", 4000.0),
        ("bw_mib_s", 16.0),
        ("lat_mean_us", 70.3),
        ("clat_p99_us", 77.312),
        ("clat_mean_us", 70.0),
        ("slat_mean_us", 0.3),
        ("lat_max_us", 90.3),
        ("cpu_cores", 1.8),
        ("context_switches_per_s", 4000.0),
        ("iops_stddev", 12.5),
    ] {
        assert!((fg[name] - value).abs() < 1e-9, "{name}: {}", fg[name]);
    }
    assert_eq!(groups[1].record.histograms["clat"], [(66048, 3000), (77312, 1000)]);
    assert!(!fg.contains_key("read_iops"));
}

#[test]
fn both_directions_are_combined() {
    let text = r#"{"jobs":[{"jobname":"fg","read":{"total_ios":1,"iops":1,"bw_bytes":4096,
        "clat_ns":{"N":1,"mean":1000,"max":1000,"bins":{"1000":1}}},
        "write":{"total_ios":3,"iops":3,"bw_bytes":12288,"clat_ns":{"N":3,"mean":3000,"max":3000,"bins":{"3000":3}}}}]}"#;
    let (_, groups) = parse(text, |_| 1).unwrap();
    let metrics = &groups[0].record.metrics;
    assert_eq!((metrics["iops"], metrics["read_iops"], metrics["write_iops"]), (4.0, 1.0, 3.0));
    assert_eq!((metrics["clat_mean_us"], metrics["clat_p50_us"]), (2.5, 3.0));
}

#[test]
fn invalid_output_is_rejected() {
    for text in ["", "fio: failed", "{", "{}", "{\"jobs\":3}", "{\"jobs\":[]}"] {
        assert!(parse(text, |_| 1).is_err(), "{text}");
    }
    // A job without any field yields a group without metrics.
    let (_, groups) = parse("{\"jobs\":[{\"read\":7,\"total_err\":5}]}", |_| 1).unwrap();
    assert_eq!((groups[0].ios, groups[0].errors), (0.0, 5));
}
